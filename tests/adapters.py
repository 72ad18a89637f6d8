"""Adapters on experts: factors in PEFT's layout, W + scale·B·A written out, the comparison."""

from functools import partial

import torch
from helpers import Case, Inputs, check_zeros, compare, make_inputs, plain, run_poisoned

from sonicmoe.integrations.lora import LowRank, lora_experts


def adapter(w: torch.Tensor, rank: int, scale: float) -> LowRank:
    experts, out_size, in_size = w.shape
    seed = torch.Generator().manual_seed(rank)
    a = torch.randn(rank * experts, in_size, generator=seed) / in_size**0.5
    b = torch.randn(out_size, rank * experts, generator=seed) / rank**0.5
    return _leaves(LowRank(a.to(w.device), b.to(w.device), scale), w.dtype)


def _leaves(lora: LowRank, dtype: torch.dtype) -> LowRank:
    a, b = (t.detach().to(dtype).requires_grad_() for t in (lora.a, lora.b))
    return LowRank(a, b, lora.scale)


def written_out(w: torch.Tensor, lora: LowRank) -> torch.Tensor:
    """PEFT's own definition of the difference."""
    a = lora.a.reshape(w.shape[0], -1, w.shape[2])
    b = lora.b.reshape(w.shape[1], -1, w.shape[0])
    return w + lora.scale * torch.einsum("ore,eri->eoi", b, a)


def run_adapted(layer, given: Inputs, lora1: LowRank, lora2: LowRank) -> dict[str, torch.Tensor]:
    """The output and the six gradients of `layer(arguments, lora1, lora2)`, by name."""
    arguments = given.arguments()
    up, down = (_leaves(lora, given.x.dtype) for lora in (lora1, lora2))
    for name in ("x", "scores"):
        arguments[name] = arguments[name].detach().requires_grad_()
    leaves = {name: arguments[name] for name in ("x", "scores")}
    leaves |= {"a1": up.a, "b1": up.b, "a2": down.a, "b2": down.b}
    out = layer(arguments, up, down)
    grads = torch.autograd.grad(out, list(leaves.values()), given.dout)
    return {"out": out.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def check_lora(case: Case, rank: int, device: str = "cpu", backend: str | None = None) -> dict:
    """`lora_experts` and its six gradients within the budget, in memory full of NaN."""
    given = make_inputs(case, device)
    loras = adapter(given.w1, rank, 0.5), adapter(given.w2, rank, 2.0)

    def ours(arguments, up, down):
        return lora_experts(**arguments, lora1=up, lora2=down, backend=backend, **case.options)

    def formed(arguments, up, down):
        weights = {"w1": written_out(arguments["w1"], up), "w2": written_out(arguments["w2"], down)}
        return plain(case)(**arguments | weights)

    got = run_poisoned(partial(run_adapted, ours, given, *loras), device)
    rough, exact = (run_adapted(formed, i, *loras) for i in (given, given.double()))
    compare(got, rough, exact, case.dtype)
    check_zeros({name: got[name] for name in ("out", "dx", "dscores")}, given)
    return got
