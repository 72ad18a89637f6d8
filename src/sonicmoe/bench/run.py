"""One case from inputs to records: verify, then time; a failing subject gets no figure.

What is compared is timed in turns: timed in one go each, a layer once took 5% longer without its
router than with it.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch

from .. import cost
from . import peers, report
from .cases import Case
from .energy import energies
from .inputs import Inputs, make_inputs
from .kernels import kernels
from .measure import Timers, needs, time_in_turns, timers, timers_of
from .published import NAME as PUBLISHED
from .published import Failed, Published
from .results import Record
from .stages import copy_terabytes_per_s, stage_times
from .subjects import OURS, Subject, ours
from .verify import Check, passed, verify


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is asked to do, the same for every case."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    concatenated: bool = False
    check: bool = True
    kernels: bool = False
    peers: Sequence[str] = ()
    sonicmoe_path: str | None = None
    without_router: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Records of what was right, a text for each thing that was wrong, tables to print."""

    records: list[Record]
    failures: list[str]
    details: list[str]


def verify_case(case: Case, routing: str, options: Options) -> Outcome:
    """Check our layer with the router in and out; print what was found."""
    inputs = make_inputs(case, routing, options.device, options.dtype)
    failures = []
    for subject in _ours(inputs, options):
        checks = verify(subject, inputs)
        print(f"\n{_title(case, routing, options)}, router {_in_or_out(subject)}")
        print(report.check_table(checks))
        if not passed(checks):
            failures.append(_failure(case, routing, subject, checks))
    return Outcome([], failures, [])


def about_case(case: Case, options: Options) -> Record:
    """What a record says about the layer that was measured."""
    return {
        "case": case.name,
        "shape": str(case.problem),
        "activation": case.activation.value,
        "bias": case.bias,
        "router_kind": case.router,
        "dtype": str(options.dtype).removeprefix("torch."),
        "gate_up": "concatenated" if options.concatenated else "interleaved",
    }


@dataclass(frozen=True, slots=True)
class _Contender:
    """A record that lacks only its times, and how to take them."""

    record: Record
    timers: Timers


def bench_case(case: Case, routing: str, options: Options) -> Outcome:
    """Measure our layer and the peers asked for; print a table; give back a record for each row."""
    shared = about_case(case, options) | {"routing": routing}
    outcome = Outcome([], [], [])
    with ExitStack() as processes:
        contenders = [
            *_subjects(case, routing, options, outcome),
            *_dense(case, options),
            *_published(case, routing, options, processes),
        ]
        if contenders:
            _progress(case, "timing all of them in turns")
        timed = _in_turns(case, contenders)
    rows = [shared | contenders[n].record | found for n, found in timed.items()]
    del contenders
    _release()
    _add_dense_share(rows)
    if rows:
        print(f"\n{_title(case, routing, options)}{'' if options.check else ', NOT VERIFIED'}")
        print(report.layer_table(rows))
    for details in outcome.details:
        print(f"\n{details}")
    records = rows + [shared | record for record in outcome.records]
    return Outcome(records, outcome.failures, [])


def energy_case(case: Case, routing: str, options: Options) -> Outcome:
    """Check our layer, then measure what its products draw beside the dense ones."""
    inputs = make_inputs(case, routing, options.device, options.dtype)
    outcome = Outcome([], [], [])
    subject = ours(inputs, router=False, concatenated=options.concatenated)
    if not _passes(subject, inputs, options, outcome)[0]:
        return outcome
    _progress(case, "energy of each product")
    found = list(energies(inputs, options.concatenated))
    print(f"\n{_title(case, routing, options)}{'' if options.check else ', NOT VERIFIED'}")
    print(report.energy_table(found))
    outcome.records.append(
        about_case(case, options)
        | {
            "routing": routing,
            "subject": "energy",
            "products": [asdict(product) for product, _ in found],
            "dense_products": [asdict(product) for _, product in found],
        }
    )
    _release()
    return outcome


def _subjects(case: Case, routing: str, options: Options, outcome: Outcome) -> Iterator[_Contender]:
    """Our layer and the peers that run in this process, each checked before the next is made."""
    inputs = make_inputs(case, routing, options.device, options.dtype)
    for subject in _ours(inputs, options):
        yield from _checked(subject, inputs, options, outcome)
    for name, make in peers.PEERS.items() if peers.comparable(inputs) else ():
        if name not in options.peers:
            continue
        try:
            yield from _checked(make(inputs), inputs, options, outcome)
        except Exception as error:  # whatever stops a peer must not stop us
            _progress(case, f"{name} gives no figure: {type(error).__name__}: {error}")


def _checked(
    subject: Subject, inputs: Inputs, options: Options, outcome: Outcome
) -> list[_Contender]:
    """The subject, or nothing where it is wrong."""
    right, checks = _passes(subject, inputs, options, outcome)
    if not right:
        return []
    record: Record = {"subject": subject.name, "router": _in_or_out(subject)}
    record |= _balance(inputs, subject.router) | needs(subject)
    record["checks"] = [asdict(check) for check in checks]
    if options.kernels and subject.name == OURS and subject.router:
        _detail(subject, options, outcome)
    _release()
    return [_Contender(record, timers_of(subject))]


def _passes(
    subject: Subject, inputs: Inputs, options: Options, outcome: Outcome
) -> tuple[bool, list[Check]]:
    """Whether the subject is right, as far as anybody asked, and what was found."""
    if not options.check:
        return True, []
    case = inputs.case
    _progress(case, f"verifying {subject.name}, router {_in_or_out(subject)}")
    checks = verify(subject, inputs, peer=subject.name != OURS)
    if not passed(checks):
        outcome.failures.append(_failure(case, inputs.routing, subject, checks))
    return passed(checks), checks


def _dense(case: Case, options: Options) -> Iterator[_Contender]:
    """The limit."""
    if peers.DENSE in options.peers:
        calls = peers.dense(case.problem, options.device, options.dtype)
        yield _Contender({"subject": peers.DENSE, "router": "in"}, timers(*calls, options.device))


def _published(
    case: Case, routing: str, options: Options, processes: ExitStack
) -> Iterator[_Contender]:
    """The published package, in a process of its own that ends with `processes`."""
    if not options.sonicmoe_path or case.bias or case.router == "sigmoid":
        return
    _progress(case, "verifying the published package; its first call takes minutes")
    dtype = str(options.dtype).removeprefix("torch.")
    package = processes.enter_context(
        Published(options.sonicmoe_path, case, routing, dtype, options.device)
    )
    try:
        found = package.needs()
    except Failed as why:
        print(f"{case.name}: published package: {why}", file=sys.stderr)
        return
    record = {"subject": PUBLISHED, "router": "in"} | found
    yield _Contender(record, Timers(package.forward, package.both))


def _in_turns(case: Case, contenders: list[_Contender]) -> dict[int, dict[str, float]]:
    """Times by place in the list; whatever stops a peer must not stop us."""
    stopped = set()

    def unless_stopped(n: int, timer: Callable[[], float]) -> Callable[[], float]:
        def time() -> float:
            try:
                return math.nan if n in stopped else timer()
            except Exception as error:
                name = contenders[n].record["subject"]
                if name == OURS:
                    raise
                _progress(case, f"{name} gives no figure: {type(error).__name__}: {error}")
                stopped.add(n)
                return math.nan

        return time

    timed = time_in_turns(
        case.problem,
        {
            n: Timers(*(unless_stopped(n, timer) for timer in contender.timers))
            for n, contender in enumerate(contenders)
        },
    )
    return {n: found for n, found in timed.items() if n not in stopped}


def _detail(subject: Subject, options: Options, outcome: Outcome) -> None:
    """The layer taken apart: operators timed one by one, kernels as the profiler sees them."""
    bandwidth = copy_terabytes_per_s(options.device)
    stages = stage_times(subject.forward_backward, options.device)
    found = kernels(subject.forward_backward, options.device)
    outcome.records.append(
        {
            "subject": "operators",
            "router": "in",
            "copy_tb_s": bandwidth,
            "operators": [asdict(stage) for stage in stages],
            "kernels": [asdict(kernel) for kernel in found],
        }
    )
    outcome.details.append(report.stage_table(stages, bandwidth))
    outcome.details.append(report.kernel_table(found))


def _ours(inputs: Inputs, options: Options) -> list[Subject]:
    routers = (True, False) if options.without_router else (True,)
    return [ours(inputs, router=router, concatenated=options.concatenated) for router in routers]


def _add_dense_share(records: list[Record]) -> None:
    limit = next((r["fwd_bwd_ms"] for r in records if r["subject"] == peers.DENSE), None)
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


def _in_or_out(subject: Subject) -> str:
    return "in" if subject.router else "out"


def _title(case: Case, routing: str, options: Options) -> str:
    shape = str(case.problem)
    name = shape if case.name == shape else f"{case.name} ({shape})"
    bias = " with bias" if case.bias else ""
    return (
        f"{name}, {case.activation.value}{bias}, {case.router}, {routing} routing, {options.dtype}"
    )


def _failure(case: Case, routing: str, subject: Subject, checks: list[Check]) -> str:
    bad = ", ".join(check.tensor for check in checks if not check.passed)
    head = (
        f"{case.name}, {routing} routing: {subject.name}, router {_in_or_out(subject)}: wrong {bad}"
    )
    return f"{head}\n{report.check_table(checks)}"


def _progress(case: Case, what: str) -> None:
    print(f"{case.name}: {what}", file=sys.stderr, flush=True)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
