"""Run one case: make inputs, verify every candidate, time those that pass, return records.

Candidates are timed interleaved. Timed one after the other, a layer once took 5% longer without its
router than with it.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from sonicmoe.tools import cost, verify_run
from sonicmoe.tools.candidates import OURS, Candidate, ours
from sonicmoe.tools.cases import Case
from sonicmoe.tools.inputs import Inputs, make_inputs
from sonicmoe.tools.verify import Check, passed, verify
from sonicmoe.tools.verify_run import failure_text, in_or_out, release

from . import dense, run_tables
from .kernels import kernels
from .measure import Timers, needs, time_interleaved, timers, timers_of
from .per_op import copy_terabytes_per_s, per_op_times
from .results import Record


@dataclass(frozen=True, slots=True)
class Options(verify_run.Options):
    """Settings of a run, the same for every case."""

    check: bool = True
    kernels: bool = False
    without_router: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Records of the candidates that passed, one text per failure, tables to print."""

    records: list[Record]
    failures: list[str]
    details: list[str]


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
        print(run_tables.layer_table(rows))
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
    record: Record = {"candidate": candidate.name, "router": in_or_out(candidate)}
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
    progress(case, f"verifying {candidate.name}, router {in_or_out(candidate)}")
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
    outcome.details.append(run_tables.per_op_table(ops, bandwidth))
    outcome.details.append(run_tables.kernel_table(found))


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


def title(case: Case, routing: str, options: Options) -> str:
    return verify_run.title(case, routing, options) + ("" if options.check else ", NOT VERIFIED")


def progress(case: Case, what: str) -> None:
    print(f"{case.name}: {what}", file=sys.stderr, flush=True)
