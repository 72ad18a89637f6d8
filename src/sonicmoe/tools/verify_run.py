"""Verify our layer on the cases that a command names, and print the errors."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .candidates import Candidate, ours
from .cases import Case
from .inputs import make_inputs
from .slices import NAMES
from .tables import table
from .verify import Check, passed, verify


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a run, the same for every case."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    gate_up: str = "interleaved"


def verify_case(case: Case, routing: str, options: Options, values: str = "gaussian") -> list[str]:
    """Check our layer with and without its router, print all errors; return the failures.

    Values other than Gaussian are for the experts: the routing is given then.
    """
    inputs = make_inputs(case, routing, options.device, options.dtype, values=values)
    failures = []
    for router in (True, False) if values == "gaussian" else (False,):
        candidate = ours(inputs, router=router, gate_up=options.gate_up)
        checks = verify(candidate, inputs)
        about = "" if values == "gaussian" else f", values {values}"
        print(f"\n{title(case, routing, options)}, router {in_or_out(candidate)}{about}")
        print(check_table(checks))
        if not passed(checks):
            failures.append(failure_text(case, routing, candidate, checks, values))
    return failures


def title(case: Case, routing: str, options: Options) -> str:
    shape = str(case.problem)
    name = shape if case.name == shape else f"{case.name} ({shape})"
    bias = " with bias" if case.bias else ""
    kind = f"{case.activation.value}{bias}, {case.router}, {routing} routing"
    return f"{name}, {kind}, {options.dtype}"


def failure_text(
    case: Case, routing: str, candidate: Candidate, checks: list[Check], values: str = "gaussian"
) -> str:
    bad = ", ".join(check.tensor for check in checks if not check.passed)
    who = f"{candidate.name}, router {in_or_out(candidate)}"
    drawn = "" if values == "gaussian" else f", values {values}"
    return f"{case.name}, {routing} routing{drawn}: {who}: wrong {bad}\n{check_table(checks)}"


def in_or_out(candidate: Candidate) -> str:
    return "in" if candidate.router else "out"


def check_table(checks: Sequence[Check]) -> str:
    rows = [
        [
            check.tensor,
            f"{check.error:.2e}",
            f"{check.plain:.2e}",
            f"{check.error / check.plain:.3f}" if check.plain else "–",
            _verdict(check),
        ]
        for whole in checks
        for check in (whole, *whole.slices)
    ]
    return table(("tensor", "error", "plain PyTorch", "ratio", ""), rows)


def _verdict(check: Check) -> str:
    if not check.error <= check.allowed:
        return f"FAILS (at most {check.allowed:.2e})"
    what = NAMES.get(check.tensor, "token" if check.tensor == "scores" else "expert")
    if check.wrong:
        return f"FAILS ({check.wrong} {what}s not zero or not finite where they must be)"
    left_out = (
        f", {check.skipped} {what}s left out: plain PyTorch overflows" if check.skipped else ""
    )
    return f"ok{left_out}"


def device_name(device: str | torch.device) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    from platform import machine

    return f"CPU {machine()}"


def release() -> None:
    """Return memory that is not in use to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
