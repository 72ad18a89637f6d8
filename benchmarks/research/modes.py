"""Modes of running a layer (eager, checkpointed, compiled, …): each is checked, then timed."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from sonicmoe.moe import MoE
from sonicmoe.tools.cases import Case
from sonicmoe.tools.inputs import make_inputs

from .timing import interleaved, is_cuda, median_ms

Gradients = dict[str, torch.Tensor]
PLAIN = "plain"
# Name of the mode, and the field of its time in a record.
MODES = {
    name: f"{name}_fwd_bwd_ms"
    for name in (PLAIN, "checkpointed", "frozen", "main_grad", "autocast", "compiled")
}
_ROUNDING_STEPS = 8


def measure_modes(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Time of `MoE` with its auxiliary loss in every mode: ms forward and backward, interleaved."""
    modes = _modes(case, device, dtype)
    want = modes[PLAIN]()
    for name, step in modes.items():
        _check(name, step(), want, dtype)
    del want
    return interleaved({MODES[name]: partial(median_ms, s, device) for name, s in modes.items()})


def _modes(case: Case, device: str, dtype: torch.dtype) -> dict[str, Callable[[], Gradients]]:
    """One training step per mode; it returns the gradients of x and of the weights."""
    inputs = make_inputs(case, device=device, dtype=dtype)
    x, dout = inputs.x, inputs.dout
    moe = _moe(case).to(device, dtype)

    def step(moe: torch.nn.Module, layer: Callable | None = None, autocast: bool = False):
        context = torch.autocast(device.split(":")[0], dtype) if autocast else nullcontext()
        with context:
            out, aux_loss = (moe if layer is None else layer)(x)
        leaves = {"x": x} | {n: p for n, p in moe.named_parameters() if p.requires_grad}
        upstream = (dout, torch.ones_like(aux_loss))
        found = torch.autograd.grad((out, aux_loss), tuple(leaves.values()), upstream)
        return dict(zip(leaves, found, strict=True))

    frozen = _sharing(case, moe)
    for experts in (frozen.c_fc, frozen.c_proj):
        experts.requires_grad_(False)
    modes: dict[str, Callable[[], Gradients]] = {
        PLAIN: partial(step, moe),
        "checkpointed": partial(step, moe, partial(checkpoint, moe, use_reentrant=False)),
        "frozen": partial(step, frozen),
        "main_grad": partial(_into_main_grad, _sharing(case, moe), x, dout),
    }
    if dtype.itemsize == 2:
        modes["autocast"] = partial(step, _sharing(case, moe).float(), autocast=True)
    if is_cuda(device):
        modes["compiled"] = partial(step, moe, torch.compile(moe))
    return modes


def _moe(case: Case) -> MoE:
    p = case.problem
    return MoE(p.E, p.K, p.H, p.I, case.activation, case.bias, router=case.router)


def _sharing(case: Case, moe: MoE) -> MoE:
    """Another layer with the same tensors as its weights."""
    with torch.device("meta"):
        other = _moe(case)
    other.load_state_dict(moe.state_dict(), assign=True)
    return other


def _into_main_grad(moe: MoE, x: torch.Tensor, dout: torch.Tensor) -> Gradients:
    """The weights' `main_grad`: gradients after the first call, sums after later ones."""
    weights = {"c_fc.weight": moe.c_fc.weight, "c_proj.weight": moe.c_proj.weight}
    for weight in weights.values():
        if not hasattr(weight, "main_grad"):
            setattr(weight, "main_grad", torch.zeros_like(weight, dtype=torch.float32))  # noqa: B010
    out, aux_loss = moe(x)
    torch.autograd.backward((out, aux_loss), (dout, torch.ones_like(aux_loss)))
    moe.zero_grad()
    x.grad = None
    return {name: getattr(weight, "main_grad") for name, weight in weights.items()}  # noqa: B009


def _check(name: str, got: Gradients, want: Gradients, dtype: torch.dtype) -> None:
    allowed = _ROUNDING_STEPS * torch.finfo(dtype).eps
    for of, gradient in got.items():
        exact = want[of].double()
        error = ((gradient.double() - exact).norm() / exact.norm()).item()
        if not error <= allowed:  # fails for NaN too
            raise RuntimeError(
                f"{name}: the gradient of {of} differs from the plain layer's by {error:.2g} of "
                f"its norm, {allowed:.2g} allowed"
            )
