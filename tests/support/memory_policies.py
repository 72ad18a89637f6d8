"""Checks of the memory policies, for every backend."""

from functools import partial

import torch
from helpers import Case, compare, make_inputs, ours, plain, relative_error, run, run_poisoned

from sonicmoe import ActivationType, MemoryPolicy

# The same bits as "keep". Five slices of 200 columns are four of 64 and one of 8.
EXACT = ("recompute", MemoryPolicy(slices=2), MemoryPolicy("recompute", slices=5))
POLICIES = ("keep", "e4m3", *EXACT)
# Of the norm, for gaussians of order one: one rounding to e4m3 is 2.65%.
BAR = {"dx": 0.035, "dw1": 0.035, "db1": 0.035, "dw2": 0.047, "dscores": 0.047}
SQUARE = 0.06  # of dW2 and dscores: A = Z² has twice the relative error of Z

GATED, PLAIN = ActivationType.SWIGLU, ActivationType.GELU
# N = 272, so three blocks of Z, the last one short; I = 72, so half a block past the first.
CASES = [
    Case("128,200,136,5,3", torch.bfloat16, GATED, True),
    Case("128,200,136,5,3", torch.bfloat16, GATED, False, "concatenated", True, "dropped"),
    Case("128,200,72,5,2", torch.float32, GATED, True, "concatenated", routing="empty_experts"),
    Case("128,200,136,5,2", torch.float16, PLAIN, True, transposed=True, routing="one_expert"),
    Case("128,200,72,5,2", torch.float32, ActivationType.SWIGLU_CLAMPED, False),
    Case("1,200,72,5,2", torch.bfloat16, GATED, True, "concatenated"),
    Case("0,200,72,5,2", torch.bfloat16, PLAIN, True),
]


def results(case: Case, memory, device: str = "cpu", backend: str | None = None) -> dict:
    """Output and gradients with one policy, in memory full of NaN."""
    layer = partial(ours(case, backend), memory=memory)
    return run_poisoned(partial(run, layer, make_inputs(case, device)), device)


def check_against_reference(case: Case, device: str = "cpu", backend: str = "triton") -> None:
    """Kernels with Z in e4m3 err against fp64 as much as the reference does."""
    if case.problem.T < 2:
        return
    inputs = make_inputs(case, device)
    rough = run(partial(ours(case, "torch"), memory="e4m3"), inputs)
    exact = run(plain(case), inputs.double())
    compare(results(case, "e4m3", device, backend), rough, exact, case.dtype)


def check_bars(got: dict, case: Case) -> None:
    exact = run(plain(case), make_inputs(case, got["out"].device.type).double())
    squared = case.activation == ActivationType.RELU_SQ
    for name, bar in BAR.items():
        if name in got:
            bar = SQUARE if squared and name in ("dw2", "dscores") else bar
            error = relative_error(got[name], exact[name])
            assert error <= bar, f"{name}: {error:.2%} of the norm, allowed {bar:.1%}"


def check_not_finite(bad: float, device: str, backend: str, gate_up: str) -> None:
    """A token that is not finite has such gradients, no other token has."""
    case = Case("24,64,72,3,2", torch.bfloat16, GATED, gate_up=gate_up, routing="uniform")
    inputs = make_inputs(case, device)
    inputs.x[17, 3] = bad
    inputs.differentiable = ("x", "scores")
    got = run(partial(ours(case, backend), memory="e4m3"), inputs)
    for name in ("dx", "dscores"):
        finite = got[name].isfinite().all(1)
        assert not finite[17] and finite.sum() == 23, name
