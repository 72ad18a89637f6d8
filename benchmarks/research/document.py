"""docs/benchmarks.md and the table of the README, made from the kept results and nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sonicmoe.tools.candidates import OURS
from sonicmoe.tools.tables import table
from sonicmoe_trainer.progress import count

from . import fp8, kept
from .dense import DENSE
from .finetune import BASE, ERRORS, TUNED
from .host import CANDIDATES as HOST_ROWS
from .host import HOST
from .modes import MODES
from .packed_tables import packed, packed_peers
from .results import Record
from .rounding_sweep import sweep_table
from .section import Section, form
from .step_tables import graphs, models, steps
from .training_report import (
    LAST,
    base_table,
    errors_table,
    finetune_table,
    origins,
    precision_table,
    throughput_table,
)

Evidence = Mapping[str, Any]  # a training/**/evidence.json
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
NOTHING = "No results are kept yet."
_METHOD = Path(__file__).with_name("method.md")


def document(
    records: Sequence[Record], evidence: Sequence[Evidence] = (), pictures: Mapping | None = None
) -> str:
    """The whole of docs/benchmarks.md. `pictures`: links to charts by (device, dtype)."""
    parts, runs = [HEAD], []
    for (device, dtype), found in kept.by_device(records).items():
        sections = _sections(device, dtype, records, found, evidence)
        if not sections:
            continue
        parts.append(f"## {device}, {dtype}")
        if picture := (pictures or {}).get((device, dtype)):
            parts.append(f"![Speed and memory of one layer on {device}]({picture})")
        parts += map(str, sections)
        runs += _runs(sections)
    if not runs:
        return f"{HEAD}\n\n{NOTHING}\n"
    return "\n\n".join([*parts, _METHOD.read_text().strip(), _provenance(runs)]) + "\n"


def _runs(sections: Sequence[Section]) -> list[tuple[str, kept.Source]]:
    """Every run, and the tables that show it."""
    titles: dict[kept.Source, list[str]] = {}
    for section in sections:
        for source in kept.sources(section.records):
            titles.setdefault(source, []).append(section.title)
    return [(", ".join(shown), source) for source, shown in titles.items()]


def _provenance(runs: Sequence[tuple[str, kept.Source]]) -> str:
    versions = sorted({source.versions for _, source in runs})
    caption = "Commands are those of the commit that was measured"
    caption += f", with {versions[0]}." if len(versions) == 1 else "."
    head = ["table", "layers", "date", "commit", "command"] + ["versions"] * (len(versions) > 1)
    titles = [title for title, _ in runs]
    rows = [
        ["″" if titles[i - 1 : i] == [title] else title, *source][: len(head)]
        for i, (title, source) in enumerate(runs)
    ]
    return f"## Provenance\n\n{caption}\n\n{table(head, rows)}"


HEAD = """# Benchmarks

How fast is one MoE layer, how much memory does it keep, and compared with what? Letters are in the
[glossary](glossary.md). `python benchmarks/report.py` writes this from `benchmarks/results/`."""


def _sections(
    device: str, dtype: str, everything: Sequence[Record], found: Sequence[Record],
    evidence: Sequence[Evidence],
) -> list[Section]:  # fmt: skip
    layers = kept.newest_layers(found)
    made = [
        _times(layers, kept.measured_gpu(device, dtype)),
        _memory(layers),
        _fp8(found),
        _policies(found),
        _skew(found),
        _modes(found),
        _host(found),
        _cold(found),
    ]
    if dtype == "bfloat16":
        mine = [r for r in everything if r["device"] == device]
        made += [_rounding(mine), packed(mine), packed_peers(mine)]
        made += [graphs(mine), models(mine), steps(mine)]
        ours = [e for e in evidence if e["device"] == device]
        made += [part(e) for part in (_training, _precision, _finetuning, _errors) for e in ours]
    return [section for section in made if section]


# --- the layer and other implementations ----------------------------------------------------------
def _times(layers: kept.Runs, gpu: str | None) -> Section | None:
    if not layers:
        return None
    peers = _peers(layers)
    head = ["layer", "T,H,I,E,K", "this package", *map(kept.PEERS.__getitem__, peers)]
    head += ["dense cuBLAS"] + ["roofline"] * bool(gpu) + ["fraction of dense cuBLAS"]
    rows: list[list[object]] = []
    for layer, found in layers.items():
        times = [found[OURS], *kept.peers_of(found).values()]
        best = min(r["fwd_bwd_ms"] for r in times) if len(times) > 1 else 0.0
        row = [layer.name, layer.shape, *(_ms(found.get(p), best) for p in (OURS, *peers))]
        row.append(form(found.get(DENSE, {}).get("fwd_bwd_ms"), "{:.2f}"))
        if gpu:
            row.append(f"{kept.roofline(layer, gpu):.2f}")
        rows.append([*row, form(kept.speedup(found, DENSE), "{:.2f}")])
    bold = "; the fastest layer is bold" if peers else ""
    mine = [found[OURS] for found in layers.values()]
    tuned = "; with a table of `sonicmoe tune`" if any(r.get("tuned") for r in mine) else ""
    caption = f"ms forward / both passes; dense cuBLAS and roofline: both passes{bold}{tuned}."
    return Section("Time of one layer", caption, table(head, rows), mine)


def _memory(layers: kept.Runs) -> Section | None:
    layers = {k: found for k, found in layers.items() if found[OURS].get("kept_mib")}
    if not layers:
        return None
    names = {OURS: "this package"} | {p: kept.PEERS[p] for p in _peers(layers)}
    rows = [
        [layer.label, *(_mib(found.get(name)) for name in names)] for layer, found in layers.items()
    ]
    caption = "MiB kept from forward to backward / at the peak, beside inputs and weights."
    head = ("layer", *names.values())
    return Section("Memory", caption, table(head, rows), [f[OURS] for f in layers.values()])


def summary(records: Sequence[Record]) -> str:
    """The table of the README: layers that were measured beside other implementations."""
    parts = []
    for (device, dtype), found in kept.by_device(records).items():
        layers = {k: f for k, f in kept.newest_layers(found).items() if kept.peers_of(f)}
        if not layers:
            continue
        peers = _peers(layers)
        head = ["layer", "T,H,I,E,K", "ms"] + [f"vs {kept.PEERS[p]}" for p in peers]
        head += ["fraction of dense cuBLAS", "kept MiB"]
        rows = [
            [layer.name, layer.shape, f"{f[OURS]['fwd_bwd_ms']:.2f}"]
            + [form(kept.speedup(f, p), "{:.2f}×") for p in peers]
            + [form(kept.speedup(f, DENSE), "{:.2f}"), form(f[OURS].get("kept_mib"), "{:.0f}")]
            for layer, f in layers.items()
        ]
        caption = f"One layer, forward and backward, on one {device} in {dtype}; vs: speedup."
        parts.append(f"{table(head, rows)}\n\n{caption}")
    return "\n\n".join(parts) or NOTHING


def _peers(layers: kept.Runs) -> list[str]:
    return [peer for peer in kept.PEERS if any(peer in found for found in layers.values())]


def _ms(record: Record | None, best: float) -> str:
    if record is None:
        return ""
    both = f"{record['fwd_bwd_ms']:.2f}"
    return f"{record['fwd_ms']:.2f} / {f'**{both}**' if record['fwd_bwd_ms'] <= best else both}"


def _mib(record: Record | None) -> str:
    if record is None or "kept_mib" not in record:
        return ""
    both = (record["kept_mib"], record.get("peak_mib"))
    return " / ".join(f"{mib:.0f}" for mib in both if mib is not None)


def _fp8(records: Sequence[Record]) -> Section | None:
    measured = [r for r in records if r.get("kind") == fp8.KIND]
    runs = kept.newest_runs(measured, candidate=OURS)
    if not runs:
        return None
    found = fp8.fp8_table({layer.label: run for layer, run in runs.items()})
    caption = "A step forward and backward at settled clocks ([how](../benchmarks/README.md#fp8))."
    return Section("FP8", caption, found, [run[0] for run in runs.values()])


def _policies(records: Sequence[Record]) -> Section | None:
    """A row for each precision and policy of the newest run."""
    measured = [r for r in records if r.get("kind") == "memory policies"]
    if not measured:
        return None
    newest = max(r["date"] for r in measured)
    measured = [r for r in measured if r["date"] == newest]
    cases = list(dict.fromkeys(r["case"] for r in measured))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for r in measured:
        if "," in r["memory"]:  # both at once: their effects add up
            continue
        key = (r["precision"] or "bf16", r["memory"])
        cell = f"{r['ms']:.2f}, {r['kept_mib']:.0f} / {r['peak_mib']:.0f}"
        found.setdefault(key, {})[r["case"]] = cell
    rows = [[*key, *map(cells.get, cases)] for key, cells in found.items()]
    caption = (
        "ms, and MiB kept / at the peak. FP8 without cached weights, whose transposes it keeps."
    )
    head = ("precision", "memory", *cases)
    firsts = [next(r for r in measured if r["case"] == case) for case in cases]
    return Section("Memory policies", caption, table(head, rows), firsts)


# --- skewed routing, modes, host time, cold start -------------------------------------------------
def _skew(records: Sequence[Record]) -> Section | None:
    given = [
        r for r in records
        if r.get("candidate") == OURS and r.get("router") == "out" and "fwd_bwd_ms" in r
    ]  # fmt: skip
    found: dict[kept.Layer, dict[str, float]] = {}
    sources: list[Record] = []
    for routing in ("zipf", "hot"):
        pair = [r for r in given if r["routing"] in ("uniform", routing)]
        for layer, run in kept.newest_runs(pair, routing=routing).items():
            times = {r["routing"]: r["fwd_bwd_ms"] for r in run}
            if "uniform" in times:
                found.setdefault(layer, {})[routing] = times[routing] / times["uniform"]
                sources += run
    if not found:
        return None
    rows = [
        [layer.label, *(form(found[layer].get(r), "{:.2f}×") for r in ("zipf", "hot"))]
        for layer in kept.ordered(found)
    ]
    caption = "Time relative to uniform routing."
    head = ("layer", "Zipf: expert e gets a share ∝ 1/(e+1)", "hot: one expert gets a quarter")
    return Section("Skewed routing", caption, table(head, rows), sources)


def _modes(records: Sequence[Record]) -> Section | None:
    runs = kept.newest_runs(r for r in records if r.get("candidate") == "modes")
    if not runs:
        return None
    rows = [
        [layer.label, *(form(run[-1].get(f), "{:.2f}") for f in MODES.values())]
        for layer, run in runs.items()
    ]
    caption = "`MoE` with its auxiliary loss, ms forward and backward."
    head = ("layer", *MODES)
    return Section("Modes", caption, table(head, rows), [run[-1] for run in runs.values()])


def _host(records: Sequence[Record]) -> Section | None:
    host = next((r for r in reversed(records) if r.get("candidate") == "host"), None)
    if host is None:
        return None
    rows = [
        [name, f"{host[f'{prefix}host_fwd_ms']:.2f}", f"{host[both]:.2f}"]
        for prefix, name in HOST_ROWS.items()
        if (both := f"{prefix}host_fwd_bwd_ms") in host
    ]
    caption = f"ms until the call returns, at {HOST.problem}."
    head = ("host time of", "forward", "forward and backward")
    return Section("Host time", caption, table(head, rows), [host])


def _cold(records: Sequence[Record]) -> Section | None:
    runs = kept.newest_runs(r for r in records if r.get("candidate") == "cold")
    if not runs:
        return None
    fields = ("new_tokens_first_ms", "new_tokens_steady_ms")
    rows = [
        [layer.label, f"{run[-1]['cold_first_call_s']:.1f}"]
        + [f"{run[-1][field]:.2f}" for field in fields]
        for layer, run in runs.items()
    ]
    caption = "First call of a new process with empty caches; then calls with another T."
    head = ("layer", "cold start, s", "new T: first call, ms", "later calls, ms")
    return Section("Cold start", caption, table(head, rows), [run[-1] for run in runs.values()])


# --- token rounding, training ---------------------------------------------------------------------
def _rounding(records: Sequence[Record]) -> Section | None:
    sweep = [r for r in records if r.get("kind") == "rounding"]
    if not sweep:
        return None
    newest = [r for r in sweep if r["date"] == sweep[-1]["date"]]
    caption = "Speedup of NR-f with tiles of 128 and 64 rows over top-K, forward and backward."
    return Section("Token rounding", caption, sweep_table(newest), newest[:1])


def _training(evidence: Evidence) -> Section | None:
    runs = [r for r in evidence["records"] if r["experiment"] == "throughput"]
    if not runs:
        return None
    caption = "The 1.4B model of `sonicmoe train`, autocast, not compiled, on one GPU."
    return Section("Whole training step", caption, throughput_table(runs), origins(evidence, runs))


def _precision(evidence: Evidence) -> Section | None:
    runs = _finished(evidence, "precision")
    if not runs:
        return None
    size = f"{count(runs[0]['parameters'])} parameters"
    caption = f"A model of {size}, differences between runs of the same seed, mean over the seeds."
    found = origins(evidence, runs)
    return Section("Training in FP8", caption, precision_table(runs), found)


def _finetuning(evidence: Evidence) -> Section | None:
    runs = _finished(evidence, TUNED)
    if not runs:
        return None
    base = _finished(evidence, BASE)
    size = f"{count(runs[0]['parameters'])} parameters"
    caption = (
        f"A trained model of {size}, outliers in its expert weights, continued on other text; "
        f"differences between runs of the same seed, mean over the seeds and the last {LAST} "
        "validations."
    )
    tables = f"{base_table(base)}\n\n{finetune_table(runs)}"
    return Section("Fine-tuning in FP8", caption, tables, origins(evidence, [*base, *runs]))


def _errors(evidence: Evidence) -> Section | None:
    found = _finished(evidence, ERRORS)
    if not found:
        return None
    caption = (
        "The layers of that model in the first step, relative to fp64: worst layer / median / 90th "
        "percentile over tokens (output, dX), rows (dW1), columns (dW2)."
    )
    title = "FP8 on weights with outliers"
    return Section(title, caption, errors_table(found), origins(evidence, found))


def _finished(evidence: Evidence, experiment: str) -> list[Mapping[str, Any]]:
    return [r for r in evidence["records"] if r["experiment"] == experiment and r.get("finished")]
