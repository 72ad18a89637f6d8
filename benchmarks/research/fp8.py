"""FP8 layers beside bf16 and beside bare GEMMs: what `benchmarks/fp8.py` runs, and its table."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

from sonicmoe.tools import cost
from sonicmoe.tools.candidates import OURS, Candidate
from sonicmoe.tools.cases import Case
from sonicmoe.tools.inputs import Inputs, make_inputs
from sonicmoe.tools.tables import table
from sonicmoe.tools.verify import passed, verify

from .bench import Options, about_case, progress, release
from .dense import DENSE
from .energy import Board, measure
from .fp8_candidates import (
    CANDIDATES,
    MINE,
    OF_BF16,
    OURS_FP8,
    OURS_FP8_GRAPHED,
    OURS_FP8_STEP,
    OURS_FP8_Z,
    OURS_GRAPHED,
    OURS_STEP,
    WEIGHTS,
    Call,
    fp8_linear,
)
from .results import Record
from .timing import is_cuda, median_ms

KIND = "fp8"
MARGIN = 1.5  # times the error of plain PyTorch with FP8 operands, for every FP8 layer
ROUNDS, SECONDS = 3, 0.6
PACKAGES = ("torchao", "sgl-deep-gemm")
NAMES = {
    OURS: "this package, bf16",
    OURS_GRAPHED: "this package, bf16, graphed",
    OURS_STEP: "this package, bf16, step in one graph",
    OURS_FP8: "this package, FP8",
    OURS_FP8_GRAPHED: "this package, FP8, graphed",
    OURS_FP8_STEP: "this package, FP8, step in one graph",
    OURS_FP8_Z: "this package, FP8, Z too",
    WEIGHTS: "quantizing its weights",
    DENSE: "dense cuBLAS, bf16",
    "dense_fp8": "`_scaled_mm`, bare GEMMs",
    "grouped_fp8": "`_scaled_grouped_mm`, bare GEMMs",
    "torchao_rowwise": "torchao, row-wise",
    "torchao_blockwise": "torchao, block-wise on DeepGEMM",
}


def bench_case(
    case: Case, names: Sequence[str], options: Options, rounds: int, seconds: float
) -> list[Record]:
    """A record for each candidate, with its times or with the reason why it `failed`."""
    shared = about_case(case, options) | {"kind": KIND, "routing": "uniform"} | versions()
    records: dict[str, Record] = {name: shared | {"candidate": name} for name in names}
    inputs = make_inputs(case, "uniform", options.device, options.dtype)
    torch.compiler.reset()  # after eight shapes the compiler would fall back to eager
    calls: dict[str, Call] = {}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}

    def give_up(name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        records[name]["failed"] = reason
        calls.pop(name, None)
        progress(case, f"{name} is not timed: {reason}")

    for name in names:
        try:
            made = CANDIDATES[name](inputs)
            if isinstance(made, Candidate):
                records[name] |= verified(made, inputs)
                progress(case, f"{name} verified, out errs {100 * records[name]['error']:.2f}%")
                made = made.forward_backward
            calls[name] = made
        except Exception as error:  # a peer that raises must not stop the benchmark
            give_up(name, error)
        release()
    board = Board(options.device) if is_cuda(options.device) else None
    for _ in range(rounds):
        for name, call in list(calls.items()):
            try:
                found = sample(name, call, options.device, board, seconds)
                samples[name].append(found)
                progress(case, f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()))
            except Exception as error:
                give_up(name, error)
    flops = cost.forward_flops(case.problem) + cost.backward_flops(case.problem)
    for name in calls:
        for key in samples[name][0]:
            records[name][key] = statistics.median(found[key] for found in samples[name])
        if name != WEIGHTS:
            records[name]["tflops"] = flops / records[name]["ms"] / 1e9
    return list(records.values())


def versions() -> Record:
    """Of the packages that were found."""
    found = {d.name: d.version for d in metadata.distributions() if d.name in PACKAGES}
    return {"packages": found}


def verified(candidate: Candidate, inputs: Inputs) -> Record:
    """The checks against fp64; raises if one failed."""
    plain: dict[str, Any] = {}
    if candidate.name not in OF_BF16:
        plain = {"margin": MARGIN, "linear": fp8_linear}
    checks = verify(candidate, inputs, peer=candidate.name not in MINE, **plain)
    if not passed(checks):
        wrong = [
            f"{c.tensor} {c.error:.2%} (allowed {c.allowed:.2%})" for c in checks if not c.passed
        ]
        raise RuntimeError(f"differs from fp64: {', '.join(wrong)}")
    return {"error": checks[0].error, "checks": [asdict(check) for check in checks]}


def sample(
    name: str, call: Call, device: str, board: Board | None, seconds: float
) -> dict[str, float]:
    """One turn: on a GPU with settled clocks, without a pause, and with the board's energy.

    The backward pass stays in this thread: in autograd's the host took 3.1 ms instead of 1.8 at
    7b-fine, where the GPU works 2.1.
    """
    with torch.autograd.set_multithreading_enabled(False):
        if board is None:
            return {"ms": median_ms(call, device)}
        found = measure(name, 0, call, board, seconds)
    energy = {"watts": found.watts, "mhz": found.mhz, "millijoules": found.millijoules}
    return {"ms": found.ms} | energy


def call_once(case: Case, names: Sequence[str], options: Options) -> None:
    """Compile what the layers need, for a process that starts later."""
    inputs = make_inputs(case, "uniform", options.device, options.dtype)
    for name in names:
        try:
            made = CANDIDATES[name](inputs) if name not in _NOTHING_TO_COMPILE else None
            if isinstance(made, Candidate):
                made.forward_backward()
        except Exception as error:  # reported when it is measured
            print(f"{case.name}: {name}: {type(error).__name__}", file=sys.stderr)
        release()


_NOTHING_TO_COMPILE = (WEIGHTS, DENSE, "dense_fp8", "grouped_fp8")


def fp8_table(runs: Mapping[str, Sequence[Record]]) -> str:
    """Times with speedups, energies, and what failed; a column for each layer, by its label."""
    names = [n for n in NAMES if any(r["candidate"] == n for run in runs.values() for r in run)]
    found = {
        label: {r["candidate"]: r for r in run if "ms" in r} for label, run in runs.items()
    }  # fmt: skip
    times: list[list[object]] = []
    energies: list[list[object]] = []
    for name in names:
        of_layers = [run.get(name, {}) for run in found.values()]
        base = [run.get(OURS, {}).get("ms") for run in found.values()]
        cells = [_time(r.get("ms"), b, name) for r, b in zip(of_layers, base, strict=True)]
        worst = max((100 * r.get("error", 0.0) for r in of_layers), default=0.0)
        times.append([NAMES[name], *cells, f"{worst:.1f}%" if worst else None])
        joules = [r.get("millijoules", 0.0) / 1e3 for r in of_layers]
        if any(joules):
            energies.append([NAMES[name], *(f"{j:.2f}" if j else None for j in joules)])
    parts = [table(("ms (speedup)", *runs, "error of the output"), times)]
    if energies:
        parts.append(table(("J", *runs), energies))
    reasons: dict[str, list[str]] = {}
    for label, run in runs.items():
        for r in run:
            if "failed" in r:
                reasons.setdefault(f"{NAMES[r['candidate']]}: `{r['failed']}`", []).append(label)
    return "\n\n".join([*parts, *(f"{', '.join(at)}: {why}" for why, at in reasons.items())])


def _time(ms: float | None, base: float | None, name: str) -> str | None:
    if ms is None:
        return None
    speedup = f" ({base / ms:.2f}×)" if base and name not in (OURS, WEIGHTS) else ""
    return f"{ms:.2f}{speedup}"
