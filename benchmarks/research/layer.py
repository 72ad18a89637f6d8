"""One layer beside its peers, its energy and other figures: what `benchmarks/layer.py` runs."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace

import torch

from sonicmoe.tools.candidates import ours
from sonicmoe.tools.cases import Case
from sonicmoe.tools.inputs import Inputs, make_inputs
from sonicmoe.tools.tables import table

from . import peers
from .bench import (
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
from .cold import measure_cold
from .energy import Energy, energies
from .host import HOST, measure_host
from .measure import Timers
from .modes import measure_modes
from .published import NAME as PUBLISHED
from .published import Failed, Published
from .results import Record
from .run_tables import figure_table


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


# What --instead names: figures of a case, a device and a dtype. Host time has a case of its own.
FIGURES: dict[str, Callable[[Case, str, torch.dtype], dict[str, float]]] = {
    "host": lambda case, device, dtype: measure_host(device, dtype),
    "cold": lambda case, device, dtype: measure_cold(case, device, dtype),
    "modes": measure_modes,
}


def figures_case(name: str, case: Case, routing: str, options: Options) -> Outcome:
    """Verify our layer, then measure the figures `name`, under uniform routing."""
    case = HOST if name == "host" else case
    interleaved = replace(options, gate_up="interleaved")  # the only layout these know
    inputs = make_inputs(case, "uniform", options.device, options.dtype)
    outcome = Outcome([], [], [])
    if not passes(ours(inputs, router=True), inputs, interleaved, outcome)[0]:
        return outcome
    found = FIGURES[name](case, options.device, options.dtype)
    print(f"\n{name}, {case.name}\n{figure_table(found)}")
    outcome.records.append(about_case(case, interleaved) | {"candidate": name} | found)
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
