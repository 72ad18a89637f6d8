"""The benchmark section of the README, made from kept results and from nothing else.

Of each layer the newest run counts, with the peers that were measured in that run: figures of two
runs are not compared.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..cost import GPUS, backward_stages, forward_stages
from ..enums import ActivationType
from ..errors import bad_argument
from ..shapes import Problem
from ..train import plots
from .cases import CASES, HOST
from .host import SUBJECTS
from .peers import DENSE
from .published import NAME as PUBLISHED
from .results import Record, slug
from .subjects import OURS
from .ways import WAYS

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

_PEERS = {
    PUBLISHED: "published SonicMoE",
    "scattermoe": "ScatterMoE",
    "grouped_mm": "PyTorch `grouped_mm`",
    DENSE: "dense products alone",
}


class Layer(NamedTuple):
    """What makes two records comparable, beside the run."""

    case: str
    shape: str
    activation: str = "swiglu"
    bias: bool = False
    router_kind: str = "softmax_over_topk"
    gate_up: str = "interleaved"

    @classmethod
    def of(cls, record: Record) -> "Layer":
        known = {name: record[name] for name in cls._fields if name in record}
        if record["case"] != record["shape"]:  # a named case is the same with a truer router
            known.pop("router_kind", None)
        return cls(**known)

    def __str__(self) -> str:
        if self.case != self.shape:  # a named case brings its own activation, bias and router
            name, special = f"{self.case} ({self.shape})", [self.gate_up]
        else:
            bias = "bias" if self.bias else ""
            name, special = self.shape, [self.activation, bias, self.router_kind, self.gate_up]
        return ", ".join([name, *(word for word in special if word and word not in _USUAL)])


_USUAL = Layer._field_defaults.values()


def update_readme(readme: Path, records: Sequence[Record], pictures: Path) -> None:
    """Replace what stands between the two markers; pictures go to `pictures`/<device>."""
    text = readme.read_text() if readme.exists() else ""
    if BEGIN not in text or END not in text:
        raise bad_argument(
            "report", f"a file with the lines {BEGIN} and {END}", str(readme),
            "Put the two lines where the table should stand.",
        )  # fmt: skip
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    links = {
        title: os.path.relpath(path, readme.parent)
        for title, path in _draw(records, pictures).items()
    }
    readme.write_text(f"{before}{BEGIN}\n{readme_section(records, links)}\n{END}{after}")


def readme_section(records: Iterable[Record], pictures: Mapping[str, str] | None = None) -> str:
    """For each device and dtype: every layer that was measured, won or lost; then what is beside.

    `records` come oldest first; `pictures` are paths by the title of a table.
    """
    parts = []
    for (device, dtype), found in _by_device(records).items():
        title = f"{device}, {dtype}"
        picture = (pictures or {}).get(title)
        parts += [
            f"![The layer beside its limit, {title}]({picture})" if picture else None,
            _layers(title, found, _measured_gpu(device, dtype)),
            _beside(title, found),
            _ways(title, found),
        ]
    return "\n\n".join(part for part in parts if part) or "No results are kept yet."


def _by_device(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    devices: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if "dtype" in record:
            devices.setdefault((record["device"], record["dtype"]), []).append(record)
    return dict(sorted(devices.items()))


# --- the layer and its peers ----------------------------------------------------------------------
def _newest_layers(records: Sequence[Record]) -> dict[Layer, dict[str, Record]]:
    """Of each layer the newest run: its records by subject."""
    measured = [
        r for r in records
        if r.get("router") == "in" and r.get("routing") == "uniform" and "fwd_bwd_ms" in r
    ]  # fmt: skip
    runs = _newest_runs(measured, subject=OURS)
    return {layer: {r["subject"]: r for r in run} for layer, run in runs.items()}


def _layers(title: str, records: Sequence[Record], gpu: str | None) -> str | None:
    layers = _newest_layers(records)
    if not layers:
        return None
    peers = [peer for peer in _PEERS if any(peer in found for found in layers.values())]
    head = ["case (T,H,I,E,K)", "sonicmoe", *map(_PEERS.__getitem__, peers), "of dense", "kept MiB"]
    limit = _least(layers, gpu)
    if limit:
        head.insert(-2, "least")
    rows = []
    for layer, found in layers.items():
        ours = found[OURS]
        times = [r["fwd_bwd_ms"] for subject, r in found.items() if subject != DENSE]
        best = min(times) if len(times) > 1 else 0.0  # alone, nobody wins
        cells = [str(layer), _times(ours, best), *(_times(found.get(p), best) for p in peers)]
        if limit:
            cells.append("{:.2f} / {:.2f}".format(*limit[layer]))
        cells.append(_form(ours.get("dense_share"), "{:.2f}".format))
        rows.append([*cells, _form(ours.get("kept_mib"), "{:.0f}".format)])
    mine = [found[OURS] for found in layers.values()]
    bold = ", the fastest layer in bold" if set(peers) - {DENSE} else ""
    tuned = " With a table of `sonicmoe tune`." if any(r.get("tuned") for r in mine) else ""
    caption = (
        f"{title}, the whole layer with its router: ms forward / forward and backward, medians"
        f"{bold}.{_lowest(layers.values())}{_of_the_least(layers, limit, gpu)}{tuned} "
        f"{_origin(mine)}"
    )
    return f"{_markdown(head, rows)}\n\n{caption}"


def _draw(records: Sequence[Record], folder: Path) -> dict[str, Path]:
    """Times over the least time, where the power of the device was measured; by title."""
    drawn = {}
    for (device, dtype), found in _by_device(records).items():
        layers = _newest_layers(found)
        limit = _least(layers, _measured_gpu(device, dtype))
        if not limit:
            continue
        names = {OURS: OURS} | _PEERS
        groups = {
            str(layer).replace(f" ({layer.shape})", ""): {
                names[subject]: (
                    one["fwd_bwd_ms"] / limit[layer][1],
                    f"{one['fwd_bwd_ms']:.1f} ms",
                )
                for subject in names
                if (one := by_subject.get(subject))
            }
            for layer, by_subject in layers.items()
        }
        title = f"{device}, {dtype}"
        drawn[title] = folder / slug(device) / "layer.png"
        drawn[title].parent.mkdir(parents=True, exist_ok=True)
        plots.bars(
            drawn[title], groups, "One layer, forward and backward",
            f"{title}. 1 is the least that the GPU's products, memory and power allow a whole "
            "layer, by a model;\ndense products alone are no layer: no router, no gather, no "
            "activation, no sum over a token's experts.",
            "time ÷ least time", mark=1,
        )  # fmt: skip
    return drawn


def _measured_gpu(device: str, dtype: str) -> str | None:
    """The GPU whose power was measured, by its name in `cost.GPUS`."""
    known = [name for name, gpu in GPUS.items() if gpu.power and gpu.name in device.split()]
    return known[0] if known and dtype == "bfloat16" else None


def _least(layers: Iterable[Layer], gpu: str | None) -> dict[Layer, tuple[float, float]]:
    """Milliseconds forward, forward and backward, with every stage at the GPU's limit."""
    if gpu is None:
        return {}
    seconds, found = GPUS[gpu].seconds, {}
    for layer in layers:
        p = Problem.parse(layer.shape, ActivationType(layer.activation).is_gated)
        forward = 1e3 * sum(seconds(stage) for stage in forward_stages(p))
        backward = 1e3 * sum(seconds(stage) for stage in backward_stages(p))
        found[layer] = forward, forward + backward
    return found


def _of_the_least(
    layers: dict[Layer, dict[str, Record]], limit: dict[Layer, tuple[float, float]], gpu: str | None
) -> str:
    if not limit:
        return ""
    shares = [limit[layer][1] / found[OURS]["fwd_bwd_ms"] for layer, found in layers.items()]
    return (
        " Least: every stage at the limit of the GPU's products, memory or power, by a model of "
        f"the energy that dense products take (`sonicmoe cost --gpu {gpu}`); {min(shares):.0%} to "
        f"{max(shares):.0%} of that speed is reached."
    )


def _times(record: Record | None, best: float) -> str:
    if record is None:
        return "–"
    both = f"{record['fwd_bwd_ms']:.2f}"
    won = record["subject"] != DENSE and record["fwd_bwd_ms"] <= best
    return f"{record['fwd_ms']:.2f} / {f'**{both}**' if won else both}"


def _lowest(layers: Iterable[dict[str, Record]]) -> str:
    """How often we lose, said before anybody asks."""
    layers = list(layers)
    shares = [f[OURS]["dense_share"] for f in layers if f[OURS].get("dense_share")]
    both = [f for f in layers if PUBLISHED in f]
    ratios = [f[PUBLISHED]["fwd_bwd_ms"] / f[OURS]["fwd_bwd_ms"] for f in both]
    text = ""
    if ratios:
        won = sum(ratio > 1 for ratio in ratios)
        text += (
            f" Faster than the published SonicMoE in {won} of {len(ratios)} cases: "
            f"{min(ratios):.2f} to {max(ratios):.2f} times its speed."
        )
    return text + (f" Lowest share of dense: {min(shares):.2f}." if shares else "")


# --- skewed routing, cold start, a new T, the host ------------------------------------------------
_SKEWED = ("zipf", "hot")


def _beside(title: str, records: Sequence[Record]) -> str | None:
    skewed, shown = _skew(records)
    cold = {
        layer: run[-1]
        for layer, run in _newest_runs(r for r in records if r["subject"] == "cold").items()
    }
    host = next((r for r in reversed(records) if r["subject"] == "host"), None)
    lines = []
    layers = _ordered({*skewed, *cold})
    if layers:
        head = ["case (T,H,I,E,K)", "Zipf", "hot", "cold start s", "new T: first / steady ms"]
        rows = []
        for layer in layers:
            ratios, start = skewed.get(layer, {}), cold.get(layer)
            cells = [_form(ratios.get(name), "{:.2f}×".format) for name in _SKEWED]
            rows.append([str(layer), *cells, *(_cold_cells(start) if start else "––")])
        lines += [_markdown(head, rows), ""]
    sources = [*cold.values()]
    sentences = []
    if skewed:
        sources += shown
        sentences.append(
            "Zipf and hot: time ÷ that of uniform routing in the same run, for a given choice, so "
            "that the shares are exact (hot: one expert takes a quarter of the rows)."
        )
    if cold:
        sentences.append(
            "Cold start: first forward and backward pass of a new process with empty caches, then "
            "a first call with another number of tokens."
        )
    if host:
        sources.append(host)
        figures = "; ".join(
            f"{name} {host[forward]:.2f} / {host[both]:.2f}"
            for prefix, name in SUBJECTS.items()
            if (forward := f"{prefix}host_fwd_ms") in host
            and (both := f"{prefix}host_fwd_bwd_ms") in host
        )
        sentences.append(
            f"The host at {HOST.problem}, ms forward / forward and backward: {figures}."
        )
    if not sentences:
        return None
    return "\n".join([*lines, f"{title}. {' '.join(sentences)} {_origin(sources)}"])


def _ways(title: str, records: Sequence[Record]) -> str | None:
    """The layer as people run it, a row for each case."""
    runs = _newest_runs(r for r in records if r["subject"] == "ways")
    if not runs:
        return None
    rows = [
        [str(layer), *(_form(run[-1].get(figure), "{:.2f}".format) for figure in WAYS.values())]
        for layer, run in runs.items()
    ]
    return "\n".join([
        _markdown(["case (T,H,I,E,K)", *WAYS], rows),
        "",
        f"{title}. ms of `MoE` with its auxiliary loss, forward and backward: plain; in an "
        "activation checkpoint; with frozen experts; with gradients added to an fp32 `main_grad`; "
        "with fp32 weights under autocast; compiled. "
        + _origin([run[-1] for run in runs.values()]),
    ])  # fmt: skip


def _cold_cells(record: Record) -> list[str]:
    new = f"{record['new_tokens_first_ms']:.2f} / {record['new_tokens_steady_ms']:.2f}"
    return [f"{record['cold_first_call_s']:.1f}", new]


def _skew(records: Sequence[Record]) -> tuple[dict[Layer, dict[str, float]], list[Record]]:
    """Our time under each skewed routing over the even one of the same run; the records of it."""
    given = [
        r for r in records
        if r["subject"] == OURS and r.get("router") == "out" and "fwd_bwd_ms" in r
    ]  # fmt: skip
    found: dict[Layer, dict[str, float]] = {}
    shown = []
    for routing in _SKEWED:
        pair = [r for r in given if r["routing"] in ("uniform", routing)]
        for layer, run in _newest_runs(pair, routing=routing).items():
            times = {r["routing"]: r["fwd_bwd_ms"] for r in run}
            if "uniform" in times:
                found.setdefault(layer, {})[routing] = times[routing] / times["uniform"]
                shown += run
    return found, shown


# --- what all of it needs -------------------------------------------------------------------------
def _newest_runs(records: Iterable[Record], **wanted: str) -> dict[Layer, list[Record]]:
    """For each layer the records of the newest run that has one with the values `wanted`."""
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
    return {layer: newest[layer] for layer in _ordered(newest)}


def _ordered(layers: Iterable[Layer]) -> list[Layer]:
    """Named cases in their own order, then shapes."""
    place = {name: i for i, name in enumerate(CASES)}
    return sorted(layers, key=lambda layer: (place.get(layer.case, len(place)), str(layer)))


_CASE = re.compile(r" --case[ =]\S+")


def _origin(records: Sequence[Record]) -> str:
    """Versions, dates, commits and commands of all that was shown: not all may be of one source.

    Runs that differ in their cases alone are said in one command.
    """
    newest = sorted(records, key=lambda r: r["date"], reverse=True)
    versions = dict.fromkeys(f"torch {r['torch']}, triton {r['triton']}" for r in newest)
    runs: dict[tuple[str, str, str], list[str]] = {}
    for r in newest:
        source = r["date"][:10], r["commit"] or "unknown", _CASE.sub("", r["command"])
        runs.setdefault(source, []).extend(_CASE.findall(r["command"]))
    texts = [
        f"{day}, commit {commit}: `{command}{''.join(dict.fromkeys(cases))}`"
        for (day, commit, command), cases in runs.items()
    ]
    return f"{'; '.join(versions)}; {'; '.join(texts)}."


def _form(value: float | None, form: Callable[[float], str]) -> str:
    return "–" if value is None else form(value)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
