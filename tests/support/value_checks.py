"""The error budget by token, row and column, for values like those of trained models."""

from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from helpers import (
    SLACK,
    Case,
    budget,
    check_zeros,
    floor,
    make_inputs,
    ours,
    plain,
    run,
    run_poisoned,
)

from sonicmoe.reference import layer as reference
from sonicmoe.tools.slices import ALONG, QUANTILES, carrying_the_norm, slices

# Where more than single values overflow in fp16, in plain PyTorch too.
BEYOND_FP16 = ("channels_10", "channels_30", "channels_100", "rows_100", "weights_300", "huge")


def check_values(
    case: Case,
    device: str = "cpu",
    backend: str | None = None,
    memory: str = "keep",
    seeds: int = 1,
) -> None:
    """The layer within the budget by slice, on the results of all seeds together.

    With `memory="e4m3"` kernels may err as much as the reference; the reference as much as plain
    PyTorch if it rounds Z to three bits behind the point, as e4m3 does, whatever its magnitude.
    """
    found: list[tuple[dict, dict, dict]] = []
    for seed in range(case.seed, case.seed + seeds):
        inputs = make_inputs(replace(case, seed=seed), device)
        layer = partial(ours(case, backend), memory=memory)
        got = run_poisoned(partial(run, layer, inputs), device)
        rough, exact = run(plain(case), inputs), run(plain(case), inputs.double())
        if memory == "e4m3" and backend == "torch":
            with mock.patch.object(reference, "activate", activate_three_bits):
                rough |= run(plain(case), inputs) | {"out": rough["out"]}
        elif memory == "e4m3":
            rough |= run(partial(ours(case, "torch"), memory="e4m3"), inputs)
        found.append((got, rough, exact))
        check_zeros(got, inputs)
    got, rough, exact = (
        {name: torch.cat([results[name] for results in each]) for name in each[0]}
        for each in zip(*found, strict=True)
    )
    skipped = compare_slices(got, rough, exact, case.dtype, memory)
    if case.dtype != torch.float16:
        assert not any(skipped.values()), f"plain PyTorch overflows: {skipped}"
    elif case.values not in BEYOND_FP16:
        assert max(skipped.values()) <= 0.01, f"plain PyTorch overflows: {skipped}"


def activate_three_bits(z, *options, activate=reference.activate):
    """The activation of a rounded Z, whose gradient passes the rounding unchanged."""
    mantissa, exponent = torch.frexp(z.detach().float())
    rounded = torch.ldexp((mantissa * 16).round() / 16, exponent).to(z.dtype)
    return activate(z + (rounded - z).detach(), *options)


def compare_slices(
    got: dict, rough: dict, exact: dict, dtype: torch.dtype, memory: str = "keep"
) -> dict[str, float]:
    """Median and 90th percentile of the errors by slice within the budget, and the norm.

    Slices that overflow in plain PyTorch or in exact arithmetic are left out; returned is their
    share in each result.
    """
    tokens, skipped = len(exact["out"]), {}
    for name in got:
        three = got[name], rough[name], exact[name]
        along = ALONG.get(name.removeprefix("d"), -1)
        found = slices(*three, along)
        assert not found.wrong(), f"{name}: {found.wrong()} slices not zero, or not finite"
        skipped[name] = found.skipped / max(len(found.judged), 1)
        if not found.comparable:
            continue
        step = torch.float8_e4m3fn if memory == "e4m3" and name != "out" else dtype  # that decides
        kept = [t.movedim(along, -1).flatten(0, -2)[found.judged] for t in three]
        budget(*kept, name=name, dtype=step, tokens=min(tokens, carrying_the_norm(kept[-1])))
        if name.removeprefix("d") not in ALONG:
            continue
        for q, (mine, theirs) in zip(QUANTILES, found.quantiles(), strict=True):
            allowed = SLACK * theirs + floor(step, tokens)
            assert mine <= allowed, f"{name}, quantile {q}: {mine:.3e}, allowed {allowed:.3e}"
    return skipped
