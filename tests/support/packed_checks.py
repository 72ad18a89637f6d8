"""The experts on packed weights give the bits of the experts on the decoded ones."""

from typing import Any

import torch
from packed_weights import decoded, random_packed

from sonicmoe import ActivationType, LowRank, MemoryPolicy, experts, grouped_experts
from sonicmoe.packed import PackedWeight

T, E, K, H, INNER, RANK = 20, 4, 2, 64, 32, 8
Tensors = dict[str, torch.Tensor]


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
    trains_the_other: bool = False,
    size: int = 1,
    outliers: bool = False,
    **options: Any,
) -> None:
    """Output and all gradients, of the packed weights and of what an independent decoder makes.

    `packed` says which of the weights are; the other one may be trained. `size` multiplies T, H
    and I. `outliers`: a few rows and columns are 30 times as large.
    """
    if options.get("memory") == "slices":
        options["memory"] = MemoryPolicy(slices=2)
    lora = lora and not trains_the_other
    given = _inputs(activation, bias, lora, dtype, device, size)
    if outliers:  # a token, a channel, a row of the adapters
        for name, t in given.items():
            if name in ("x", "dout", "c1", "a2"):
                t[1] *= 30
                t[:, 2] *= 30
    n = size * (2 * INNER if activation.is_gated else INNER)
    weights = [
        random_packed(format, shape, t).to(device)
        for shape, t in zip(
            ((E, n, size * H), (E, size * H, size * INNER)), transposed, strict=True
        )
    ]
    options |= {"activation": activation, "gate_up": gate_up}
    dense = [_dense(w, dtype, device) for w in weights]
    mixed = [w if p else d for w, d, p in zip(weights, dense, packed, strict=True)]
    trained = [trains_the_other and not p for p in packed]
    found, wants = (_step(given, ws, trained, is_sorted, counts, options) for ws in (mixed, dense))
    assert found.keys() == wants.keys()
    for name, want in wants.items():
        assert torch.equal(found[name], want), name
        assert want.isfinite().all() and want.count_nonzero(), name


def _dense(w: PackedWeight, dtype: torch.dtype, device: str) -> torch.Tensor:
    value = decoded(w.to("cpu"))
    stored = value.mT.contiguous().mT if w.transposed else value
    return stored.to(dtype).to(device)


def _inputs(activation, bias, lora, dtype, device, size) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    t, h, inner = size * T, size * H, size * INNER

    def new(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul(scale).to(device, dtype)

    n = 2 * inner if activation.is_gated else inner
    given = {"x": new(t, h), "dout": new(t, h)}
    given["logits"] = torch.rand(t, E, generator=generator).to(device)
    if lora:
        given |= {"a1": new(RANK * E, h, scale=0.1), "c1": new(n, RANK * E)}
        given |= {"a2": new(RANK * E, inner, scale=0.1), "c2": new(h, RANK * E)}
    if bias:
        given |= {"b1": new(E, n), "b2": new(E, h)}
    return given


def _step(given: Tensors, weights, trained, is_sorted, counts, options) -> Tensors:
    leaves = {k: t.clone() for k, t in given.items() if k not in ("dout", "logits")}
    scores, ids = given["logits"].topk(K, 1)
    if counts is not None:  # rows of each expert, of T · K
        rows = torch.tensor(counts) * (len(ids) // T)
        ids = torch.arange(E).repeat_interleave(rows).view(len(ids), K).to(ids)
    leaves["scores"] = scores[:, 0].clone() if is_sorted else scores
    has_lora, bias = "a1" in leaves, (leaves.get("b1"), leaves.get("b2"))
    for i, (w, trains) in enumerate(zip(weights, trained, strict=True), 1):
        if trains:
            leaves[f"w{i}"] = w.detach().clone()
    weights = [leaves.get(f"w{i}", w) for i, w in enumerate(weights, 1)]
    for name, leaf in leaves.items():
        leaf.requires_grad_(not (has_lora and name in ("b1", "b2")))
    if has_lora:
        options = options | {
            f"lora{i}": LowRank(leaves[f"a{i}"], leaves[f"c{i}"], 0.5) for i in (1, 2)
        }
    if is_sorted:
        rows = torch.tensor([7, 0, 12, 1], device=ids.device) * (len(ids) // T)
        args = (leaves["x"], rows, *weights, *bias, leaves["scores"])
        out = grouped_experts(*args, **options)
    else:
        options = options | dict(zip(("b1", "b2"), bias, strict=True))
        out = experts(leaves["x"], ids, leaves["scores"], *weights, **options)
    out.backward(given["dout"])
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
    return {"out": out.detach(), **found}  # type: ignore[dict-item]
