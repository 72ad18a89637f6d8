"""Select from the kept records: the newest run of every layer, with the peers of that run.

Times of two runs are never compared: the same layer differs by up to 8% between sessions.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sonicmoe.enums import ActivationType
from sonicmoe.shapes import Problem
from sonicmoe.tools.candidates import OURS
from sonicmoe.tools.cases import CASES
from sonicmoe.tools.cost import GPUS, backward_stages, forward_stages

from .host import HOST
from .published import NAME as PUBLISHED
from .results import Record

PEERS = {
    PUBLISHED: "published SonicMoE",
    "scattermoe": "ScatterMoE",
    "grouped_mm": "PyTorch `grouped_mm`",
}


class Layer(NamedTuple):
    """The fields that must agree for two records to be about the same layer."""

    case: str
    shape: str
    activation: str = "swiglu"
    bias: bool = False
    router_kind: str = "softmax_over_topk"
    gate_up: str = "interleaved"

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Layer":
        known = {name: record[name] for name in cls._fields if name in record}
        if record["case"] != record["shape"]:  # the router of a named case may have been corrected
            known.pop("router_kind", None)
        return cls(**known)

    @property
    def name(self) -> str:
        """The named case; for a plain shape only its special features, or a dash."""
        if self.case != self.shape:  # a named case brings its own activation, bias and router
            words = [self.case, self.gate_up]
        else:
            words = [self.activation, "bias" if self.bias else "", self.router_kind, self.gate_up]
        return ", ".join(word for word in words if word and word not in _USUAL) or "–"

    @property
    def label(self) -> str:
        """The name; for a plain shape the shape and its special features."""
        if self.case != self.shape:
            return self.name
        return self.shape if self.name == "–" else f"{self.shape}, {self.name}"


_USUAL = Layer._field_defaults.values()
Runs = dict[Layer, dict[str, Record]]


def by_device(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records by device and dtype."""
    devices: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if "dtype" in record:
            devices.setdefault((record["device"], record["dtype"]), []).append(record)
    return dict(sorted(devices.items()))


def newest_layers(records: Sequence[Record]) -> Runs:
    """For every layer the records of its newest run, by candidate."""
    measured = [
        r for r in records
        if r.get("router") == "in" and r.get("routing") == "uniform" and "fwd_bwd_ms" in r
    ]  # fmt: skip
    runs = newest_runs(measured, candidate=OURS)
    return {layer: {r["candidate"]: r for r in run} for layer, run in runs.items()}


def newest_runs(records: Iterable[Record], **wanted: str) -> dict[Layer, list[Record]]:
    """For every layer the records of the newest run that has one with the values `wanted`."""
    runs: dict[Layer, dict[tuple[str, str], list[Record]]] = {}
    for record in records:
        run = (record["date"], record["command"])
        runs.setdefault(Layer.of(record), {}).setdefault(run, []).append(record)
    newest = {}
    for layer, by_run in runs.items():
        having = [
            run for run, found in by_run.items()
            if any(wanted.items() <= record.items() for record in found)
        ]  # fmt: skip
        if having:
            newest[layer] = by_run[max(having)]
    return {layer: newest[layer] for layer in ordered(newest)}


def ordered(layers: Iterable[Layer]) -> list[Layer]:
    """Named cases in the order of `CASES`, then shapes."""
    place = {name: i for i, name in enumerate(CASES)}
    return sorted(layers, key=lambda layer: (place.get(layer.case, len(place)), layer.name, layer))


def peers_of(found: dict[str, Record]) -> dict[str, Record]:
    """The other implementations in a run: everything but our layer and dense cuBLAS."""
    return {name: found[name] for name in PEERS if name in found}


def speedup(found: dict[str, Record], peer: str) -> float | None:
    """How many times faster our layer is than `peer`, forward and backward, in the same run."""
    return found[peer]["fwd_bwd_ms"] / found[OURS]["fwd_bwd_ms"] if peer in found else None


def measured_gpu(device: str, dtype: str) -> str | None:
    """The key in `cost.GPUS` of the device, if its power was measured."""
    known = [name for name, gpu in GPUS.items() if gpu.power and gpu.name in device.split()]
    return known[0] if known and dtype == "bfloat16" else None


def roofline(layer: Layer, gpu: str) -> float:
    """Roofline time in ms, forward and backward."""
    p = Problem.parse(layer.shape, ActivationType(layer.activation).is_gated)
    return 1e3 * sum(map(GPUS[gpu].seconds, [*forward_stages(p), *backward_stages(p)]))


_CASE = re.compile(r" --case[ =]\S+")


class Source(NamedTuple):
    """A run that a table shows: which layers of it, and how to repeat it."""

    layers: str
    date: str
    commit: str
    command: str
    versions: str


def sources(records: Sequence[Mapping[str, Any]]) -> list[Source]:
    """The runs that `records` come from, newest first; runs that differ only in cases are one."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for r in sorted(records, key=lambda r: r["date"], reverse=True):
        versions = f"torch {r['torch']}, triton {r['triton']}"
        command = f"`{_CASE.sub('', r['command'])}`"
        key = r["date"][:10], r["commit"] or "unknown", command, versions
        layers = runs.setdefault(key, [])
        if r.get("case", HOST.name) != HOST.name and Layer.of(r).label not in layers:
            layers.append(Layer.of(r).label)
    return [Source("; ".join(layers), *key) for key, layers in runs.items()]
