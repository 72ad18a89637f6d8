"""One layer beside its peers, and the energy of its GEMMs: what `benchmarks/layer.py` runs."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from sonicmoe.bench.candidates import ours
from sonicmoe.bench.cases import Case
from sonicmoe.bench.inputs import Inputs, make_inputs
from sonicmoe.bench.measure import Timers
from sonicmoe.bench.results import Record
from sonicmoe.bench.run import (
    Entry,
    Options,
    Outcome,
    Peers,
    about_case,
    checked,
    passes,
    progress,
    release,
    title,
)
from sonicmoe.bench.tables import table

from . import peers
from .energy import Energy, energies
from .published import NAME as PUBLISHED
from .published import Failed, Published


def with_peers(names: Sequence[str], sonicmoe_path: str | None) -> Peers:
    """What `bench_case` calls for the entries beside our layer and dense cuBLAS."""

    def entries(
        inputs: Inputs, options: Options, outcome: Outcome, processes: ExitStack
    ) -> Iterator[Entry]:
        for name, make in peers.PEERS.items() if peers.comparable(inputs) else ():
            if name not in names:
                continue
            try:
                yield from checked(make(inputs), inputs, options, outcome)
            except Exception as error:  # a peer that raises must not stop the benchmark
                what = f"{name} is not timed: {type(error).__name__}: {error}"
                progress(inputs.case, what)
        if sonicmoe_path:
            yield from _published(inputs, options, processes, sonicmoe_path)

    return entries


def _published(
    inputs: Inputs, options: Options, processes: ExitStack, folder: str
) -> Iterator[Entry]:
    """The published package, in its own process, which ends with `processes`."""
    case = inputs.case
    if case.bias or case.router == "sigmoid":
        return
    progress(case, "verifying the published package; its first call takes minutes")
    dtype = str(options.dtype).removeprefix("torch.")
    package = processes.enter_context(
        Published(folder, case, inputs.routing, dtype, options.device)
    )
    try:
        found = package.needs()
    except Failed as why:
        print(f"{case.name}: published package: {why}", file=sys.stderr)
        return
    record: Record = {"candidate": PUBLISHED, "router": "in", "version": package.version}
    record |= found
    yield Entry(record, Timers(package.forward, package.both))


def energy_case(case: Case, routing: str, options: Options) -> Outcome:
    """Verify our layer, then measure the energy of its GEMMs and of dense cuBLAS."""
    inputs = make_inputs(case, routing, options.device, options.dtype)
    outcome = Outcome([], [], [])
    candidate = ours(inputs, router=False, gate_up=options.gate_up)
    if not passes(candidate, inputs, options, outcome)[0]:
        return outcome
    progress(case, "energy of each GEMM")
    found = list(energies(inputs, options.gate_up))
    print(f"\n{title(case, routing, options)}")
    print(energy_table(found))
    outcome.records.append(
        about_case(case, options)
        | {
            "routing": routing,
            "candidate": "energy",
            "gemms": [asdict(gemm) for gemm, _ in found],
            "dense_gemms": [asdict(gemm) for _, gemm in found],
        }
    )
    release()
    return outcome


def energy_table(pairs: Sequence[tuple[Energy, Energy]]) -> str:
    """Each GEMM of ours beside the dense one."""
    rows = [
        [
            ours.name, f"{ours.ms:.3f}", f"{ours.watts:.0f}", f"{ours.mhz:.0f}",
            f"{ours.millijoules:.0f}", ours.picojoules_per_flop,
            f"{dense.ms:.3f}", f"{dense.watts:.0f}", f"{dense.mhz:.0f}",
            f"{dense.millijoules:.0f}", dense.picojoules_per_flop,
        ]
        for ours, dense in pairs
    ]  # fmt: skip
    columns = ("ms", "W", "MHz", "mJ", "pJ/FLOP")
    return table(("GEMM", *columns, *(f"dense {name}" for name in columns)), rows)
