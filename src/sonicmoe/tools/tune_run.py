"""Tune the GEMMs of cases and write the table, after verifying the layer with it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import bad_argument
from ..tuning import Target, table
from ..tuning.table import Key, Table
from . import tables
from .candidates import ours
from .cases import Case
from .gemms import Gemm, gemms
from .inputs import Inputs, make_inputs
from .tune import Finding, Timer, describe, gpu_timer, tune
from .verify import passed, verify
from .verify_run import Options, device_name, failure_text, release


def tune_cases(
    cases: Sequence[Case],
    options: Options,
    names: Sequence[str],
    out: Path | None,
    timer: Timer = gpu_timer,
) -> list[str]:
    """Measure, print, and write what is faster; return the failures.

    A GEMM that cases share is measured once.
    """
    device = device_name(options.device)
    looked_for = table.path_of(device)
    path = out or looked_for
    if path is None:
        raise bad_argument(
            "--out", "a file", f"none, and {table.VARIABLE} is empty", "Name one, or unset it."
        )
    findings: dict[Key, Finding] = {}
    failures: list[str] = []
    for case in cases:
        inputs = make_inputs(case, "uniform", options.device, options.dtype)
        found, target = gemms(inputs, options.gate_up)
        new = [p for p in found if p.name in names and p.key not in findings]
        if not new:
            print(f"\n{case.name} ({case.problem}): the same GEMMs as an earlier case")
            continue
        fresh = {f.key: f for f in _measure(case, new, target, timer)}
        del found, new
        failure = _wrong(inputs, options, findings | fresh)
        if failure:
            failures.append(failure)
            continue
        findings |= fresh
        faster = [
            table.encode(f.key, f.best, default_ms=f.default_ms, ms=f.best_ms)
            for f in fresh.values()
            if f.replaces
        ]
        kept = table.write(path, device, target, fresh, faster)
        print(f"\n{case.name} ({case.problem}), {options.dtype}\n{_table(list(fresh.values()))}")
        for f in fresh.values():
            for config, fault in f.faults.items():
                print(f"left out: {f.name}, {describe(config)}: {fault}", file=sys.stderr)
        print(f"{len(kept)} entries in {path}")
        del inputs
        release()
    if findings and path != looked_for:
        print(f"To use it: export {table.VARIABLE}={path}")
    return failures


def _measure(case: Case, new: list[Gemm], target: Target, timer: Timer) -> list[Finding]:
    found = []
    for gemm in new:
        print(f"{case.name}: measuring {gemm.name}", file=sys.stderr, flush=True)
        found.append(tune(gemm, target, timer))
    return found


def _wrong(inputs: Inputs, options: Options, findings: dict[Key, Finding]) -> str | None:
    """What the layer gets wrong against fp64 with the chosen configurations; None if nothing."""
    with table.using(Table.of((key, f.chosen) for key, f in findings.items())):
        candidate = ours(inputs, router=True, gate_up=options.gate_up)
        checks = verify(candidate, inputs)
    return None if passed(checks) else failure_text(inputs.case, inputs.routing, candidate, checks)


def _table(findings: Sequence[Finding]) -> str:
    rows = [
        (f.name, describe(f.default), f"{f.default_ms:.4f}", describe(f.best), *_gains(f))
        for f in findings
    ]
    return tables.table(("GEMM", "default", "ms", "best", "ms", "TFLOP/s", "gain", ""), rows)


def _gains(f: Finding) -> tuple[str, ...]:
    verdict = "taken" if f.replaces else "default kept"
    return f"{f.best_ms:.4f}", f"{f.flops / f.best_ms / 1e9:.0f}", f"{f.gain:+.1%}", verdict
