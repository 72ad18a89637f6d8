"""Run one case: make inputs, verify every candidate, time those that pass, return records.

Candidates are timed interleaved. Timed one after the other, a layer once took 5% longer without its
router than with it.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch

from ..tools import cost
from . import dense, report
from .candidates import OURS, Candidate, ours
from .cases import Case
from .inputs import Inputs, make_inputs
from .kernels import kernels
from .measure import Timers, needs, time_interleaved, timers, timers_of
from .per_op import copy_terabytes_per_s, per_op_times
from .results import Record
from .verify import Check, passed, verify


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a run, the same for every case."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    gate_up: str = "interleaved"
    check: bool = True
    kernels: bool = False
    without_router: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Records of the candidates that passed, one text per failure, tables to print."""

    records: list[Record]
    failures: list[str]
    details: list[str]


def verify_case(case: Case, routing: str, options: Options, values: str = "gaussian") -> Outcome:
    """Check our layer with and without its router; print the errors of every tensor.

    Values other than Gaussian are for the experts: the routing is given then.
    """
    inputs = make_inputs(case, routing, options.device, options.dtype, values=values)
    failures = []
    for candidate in _ours(inputs, options):
        if candidate.router and values != "gaussian":
            continue
        checks = verify(candidate, inputs)
        about = "" if values == "gaussian" else f", values {values}"
        print(f"\n{title(case, routing, options)}, router {_in_or_out(candidate)}{about}")
        print(report.check_table(checks))
        if not passed(checks):
            failures.append(failure_text(case, routing, candidate, checks, values))
    return Outcome([], failures, [])


def about_case(case: Case, options: Options) -> Record:
    """The fields of a record that describe the layer."""
    return {
        "case": case.name,
        "shape": str(case.problem),
        "activation": case.activation.value,
        "bias": case.bias,
        "router_kind": case.router,
        "dtype": str(options.dtype).removeprefix("torch."),
        "gate_up": options.gate_up,
    }


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the comparison: its record without times, and the functions that time it."""

    record: Record
    timers: Timers


Peers = Callable[[Inputs, Options, Outcome, ExitStack], Iterable[Entry]]


def bench_case(case: Case, routing: str, options: Options, peers: Peers | None = None) -> Outcome:
    """Measure our layer, dense cuBLAS and `peers`; print a table and return a record per row."""
    shared = about_case(case, options) | {"routing": routing}
    outcome = Outcome([], [], [])
    with ExitStack() as processes:
        entries = list(_entries(case, routing, options, peers, outcome, processes))
        if entries:
            progress(case, "timing, interleaved")
        timed = _interleaved(case, entries)
    rows = [shared | entries[n].record | found for n, found in timed.items()]
    del entries
    release()
    _add_dense_share(rows)
    if rows:
        print(f"\n{title(case, routing, options)}")
        print(report.layer_table(rows))
    for details in outcome.details:
        print(f"\n{details}")
    records = rows + [shared | record for record in outcome.records]
    return Outcome(records, outcome.failures, [])


def _entries(
    case: Case,
    routing: str,
    options: Options,
    peers: Peers | None,
    outcome: Outcome,
    processes: ExitStack,
) -> Iterator[Entry]:
    """The candidates to time; none if our own layer is wrong."""
    inputs = make_inputs(case, routing, options.device, options.dtype)
    mine = [e for c in _ours(inputs, options) for e in checked(c, inputs, options, outcome)]
    if not mine:
        return
    yield from mine
    calls = dense.dense(case.problem, options.device, options.dtype)
    yield Entry({"candidate": dense.DENSE, "router": "in"}, timers(*calls, options.device))
    if peers is not None:
        yield from peers(inputs, options, outcome, processes)


def checked(
    candidate: Candidate, inputs: Inputs, options: Options, outcome: Outcome
) -> list[Entry]:
    """Verify one candidate; an empty list, and a failure in `outcome`, if it is wrong."""
    right, checks = passes(candidate, inputs, options, outcome)
    if not right:
        return []
    record: Record = {"candidate": candidate.name, "router": _in_or_out(candidate)}
    record |= _balance(inputs, candidate.router) | needs(candidate)
    record["checks"] = [asdict(check) for check in checks]
    if options.kernels and candidate.name == OURS and candidate.router:
        _detail(candidate, options, outcome)
    release()
    return [Entry(record, timers_of(candidate))]


def passes(
    candidate: Candidate, inputs: Inputs, options: Options, outcome: Outcome
) -> tuple[bool, list[Check]]:
    """Verify one candidate, unless `options` skip it; whether it passed, and its checks."""
    if not options.check:
        return True, []
    case = inputs.case
    progress(case, f"verifying {candidate.name}, router {_in_or_out(candidate)}")
    checks = verify(candidate, inputs, peer=candidate.name != OURS)
    if not passed(checks):
        outcome.failures.append(failure_text(case, inputs.routing, candidate, checks))
    return passed(checks), checks


def _interleaved(case: Case, entries: list[Entry]) -> dict[int, dict[str, float]]:
    """Times by position in the list. A peer that raises is dropped; our layer must not raise."""
    stopped = set()

    def unless_stopped(n: int, timer: Callable[[], float]) -> Callable[[], float]:
        def time() -> float:
            try:
                return math.nan if n in stopped else timer()
            except Exception as error:
                name = entries[n].record["candidate"]
                if name == OURS:
                    raise
                progress(case, f"{name} is not timed: {type(error).__name__}: {error}")
                stopped.add(n)
                return math.nan

        return time

    timed = time_interleaved(
        case.problem,
        {
            n: Timers(*(unless_stopped(n, timer) for timer in entry.timers))
            for n, entry in enumerate(entries)
        },
    )
    return {n: found for n, found in timed.items() if n not in stopped}


def _detail(candidate: Candidate, options: Options, outcome: Outcome) -> None:
    """Per-op timing, and every kernel as the profiler sees it."""
    bandwidth = copy_terabytes_per_s(options.device)
    ops = per_op_times(candidate.forward_backward, options.device)
    found = kernels(candidate.forward_backward, options.device)
    outcome.records.append(
        {
            "candidate": "operators",
            "router": "in",
            "copy_tb_s": bandwidth,
            "operators": [asdict(op) for op in ops],
            "kernels": [asdict(kernel) for kernel in found],
        }
    )
    outcome.details.append(report.per_op_table(ops, bandwidth))
    outcome.details.append(report.kernel_table(found))


def _ours(inputs: Inputs, options: Options) -> list[Candidate]:
    routers = (True, False) if options.without_router else (True,)
    return [ours(inputs, router=router, gate_up=options.gate_up) for router in routers]


def _add_dense_share(records: list[Record]) -> None:
    limit = next((r["fwd_bwd_ms"] for r in records if r["candidate"] == dense.DENSE), None)
    for record in records:
        if limit is not None and "fwd_bwd_ms" in record:
            record["dense_share"] = limit / record["fwd_bwd_ms"]


def _balance(inputs: Inputs, router: bool) -> Record:
    counts = inputs.counts(router)
    return {
        "largest_share": max(counts) / sum(counts),
        "empty_experts": counts.count(0),
        "padding_share_128": cost.padding_share(counts, 128),
    }


def _in_or_out(candidate: Candidate) -> str:
    return "in" if candidate.router else "out"


def title(case: Case, routing: str, options: Options) -> str:
    shape = str(case.problem)
    name = shape if case.name == shape else f"{case.name} ({shape})"
    bias = " with bias" if case.bias else ""
    return (
        f"{name}, {case.activation.value}{bias}, {case.router}, {routing} routing, {options.dtype}"
        f"{'' if options.check else ', NOT VERIFIED'}"
    )


def failure_text(
    case: Case, routing: str, candidate: Candidate, checks: list[Check], values: str = "gaussian"
) -> str:
    bad = ", ".join(check.tensor for check in checks if not check.passed)
    who = f"{candidate.name}, router {_in_or_out(candidate)}"
    drawn = "" if values == "gaussian" else f", values {values}"
    return (
        f"{case.name}, {routing} routing{drawn}: {who}: wrong {bad}\n{report.check_table(checks)}"
    )


def progress(case: Case, what: str) -> None:
    print(f"{case.name}: {what}", file=sys.stderr, flush=True)


def release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
