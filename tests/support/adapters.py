"""Adapters on experts: factors in PEFT's layout, W + scale·B·A written out, the comparison."""

from dataclasses import replace
from functools import partial

import torch
from helpers import Case, Inputs, check_zeros, compare, make_inputs, plain, run_poisoned

from sonicmoe import LowRank, experts


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


def randomize(model: torch.nn.Module, std: float = 0.3) -> None:
    """Of PEFT's adapters, whose B is zero at first."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=std)


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
    """`experts` with adapters and its six gradients within the budget, in memory full of NaN."""
    given = make_inputs(case, device)
    loras = adapter(given.w1, rank, 0.5), adapter(given.w2, rank, 2.0)

    def ours(arguments, up, down):
        return experts(**arguments, lora1=up, lora2=down, backend=backend, **case.options)

    def formed(arguments, up, down):
        weights = {"w1": written_out(arguments["w1"], up), "w2": written_out(arguments["w2"], down)}
        return plain(case)(**arguments | weights)

    got = run_poisoned(partial(run_adapted, ours, given, *loras), device)
    rough, exact = (run_adapted(formed, i, *loras) for i in (given, given.double()))
    compare(got, rough, exact, case.dtype)
    check_zeros({name: got[name] for name in ("out", "dx", "dscores")}, given)
    return got


def _strided(t: torch.Tensor) -> torch.Tensor:
    """Every second element of its storage."""
    return t.new_full((*t.shape[:-1], 2 * t.shape[-1]), 77)[..., ::2].copy_(t)


def _offset(t: torch.Tensor) -> torch.Tensor:
    """Contiguous, from the second element of its storage on."""
    return t.new_full((t.numel() + 1,), 77)[1:].view(t.shape).copy_(t)


LAYOUTS = {
    "strided": _strided,
    "offset": _offset,
    "expanded": lambda t: t[:1].contiguous().expand(t.shape),  # the values of its first line
    "transposed": lambda t: t.mT.contiguous().mT,
    "first dimension last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}
TENSORS = ("x", "ids", "scores", "w1", "w2", "b1", "b2", "lora1.a", "lora1.b", "lora2.a", "lora2.b")


def check_layout(tensors: tuple[str, ...], layout: str, backend: str | None = None) -> None:
    """Results do not depend on how tensors lie in memory."""
    case = Case("12,16,8,3,2", torch.float32, bias=True, routing="uniform")
    given = make_inputs(case)
    loras = [adapter(given.w1, 8, 0.5), adapter(given.w2, 8, 2.0)]

    def run(change):
        changed = {n: change(getattr(given, n)) for n in tensors if "." not in n}
        adapters = [
            lora._replace(**{
                n[-1]: change(getattr(lora, n[-1]).detach()) for n in tensors
                if n.startswith(f"lora{i}.")
            })
            for i, lora in enumerate(loras, 1)
        ]  # fmt: skip

        def layer(arguments, up, down):
            return experts(**arguments, lora1=up, lora2=down, backend=backend)

        return run_adapted(layer, replace(given, **changed), *adapters)

    want = run(lambda t: LAYOUTS[layout](t).clone(memory_format=torch.contiguous_format))
    torch.testing.assert_close(run(LAYOUTS[layout]), want)
