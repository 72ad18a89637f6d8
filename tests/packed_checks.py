"""The experts on packed weights give the bits of the experts on the decoded ones."""

from typing import Any

import torch
from packed_weights import decoded, random_packed

from sonicmoe import ActivationType, experts, grouped_experts
from sonicmoe.integrations.lora import LowRank
from sonicmoe.packed import PackedWeight

T, E, K, H, INNER, RANK = 20, 4, 2, 64, 96, 8
ALL = ("x", "scores", "a1", "c1", "a2", "c2", "b1", "b2")


def check_experts(
    format: str = "mxfp4",
    activation: ActivationType = ActivationType.SWIGLU,
    transposed: tuple[bool, bool] = (False, False),
    bias: bool = False,
    lora: bool = True,
    is_sorted: bool = False,
    gate_up: str = "interleaved",
    counts: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    packed: tuple[bool, bool] = (True, True),
    **options: Any,
) -> None:
    """Output and all gradients, of the packed weights and of what an independent decoder makes."""
    given = _inputs(activation, bias, lora, dtype, device)
    n = 2 * INNER if activation.is_gated else INNER
    weights = [
        random_packed(format, shape, t).to(device)
        for shape, t in zip(((E, n, H), (E, H, INNER)), transposed, strict=True)
    ]
    options |= {"activation": activation, "gate_up": gate_up}
    dense = [_dense(w, dtype, device) for w in weights]
    mixed = [w if p else d for w, d, p in zip(weights, dense, packed, strict=True)]
    found, wants = (_step(given, ws, is_sorted, counts, options) for ws in (mixed, dense))
    assert found.keys() == wants.keys()
    for name, want in wants.items():
        assert torch.equal(found[name], want), name
        assert want.isfinite().all() and want.count_nonzero(), name


def _dense(w: PackedWeight, dtype: torch.dtype, device: str) -> torch.Tensor:
    value = decoded(w.to("cpu"))
    stored = value.mT.contiguous().mT if w.transposed else value
    return stored.to(dtype).to(device)


def _inputs(activation, bias, lora, dtype, device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def new(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul(scale).to(device, dtype)

    n = 2 * INNER if activation.is_gated else INNER
    given = {"x": new(T, H), "dout": new(T, H), "rows": new(T, H)}
    given["logits"] = torch.rand(T, E, generator=generator).to(device)
    if lora:
        given |= {"a1": new(RANK * E, H, scale=0.1), "c1": new(n, RANK * E)}
        given |= {"a2": new(RANK * E, INNER, scale=0.1), "c2": new(H, RANK * E)}
    if bias:
        given |= {"b1": new(E, n), "b2": new(E, H)}
    return given


def _step(given, weights, is_sorted, counts, options) -> dict[str, torch.Tensor]:
    leaves = {k: t.clone() for k, t in given.items() if k in ALL}
    scores, ids = given["logits"].topk(K, 1)
    if counts is not None:  # rows of each expert
        ids = torch.arange(E).repeat_interleave(torch.tensor(counts)).view(T, K).to(ids)
    leaves["scores"] = scores[:, 0].clone() if is_sorted else scores
    has_lora, bias = "a1" in leaves, (leaves.get("b1"), leaves.get("b2"))
    for name, leaf in leaves.items():
        leaf.requires_grad_(not (has_lora and name in ("b1", "b2")))
    if has_lora:
        options = options | {
            f"lora{i}": LowRank(leaves[f"a{i}"], leaves[f"c{i}"], 0.5) for i in (1, 2)
        }
    if is_sorted:
        rows = torch.tensor([7, 0, 12, 1], device=ids.device)
        out = grouped_experts(leaves["x"], rows, *weights, *bias, leaves["scores"], **options)
    else:
        out = experts(leaves["x"], ids, leaves["scores"], *weights, *bias, **options)
    out.backward(given["dout"])
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
    return {"out": out.detach(), **found}
