"""Table and picture of the kept training steps and curves of a device."""

from pathlib import Path
from statistics import fmean
from typing import Any

from sonicmoe.tools.tables import table
from sonicmoe_trainer import plots

from .results import Record, read, slug
from .training_step import PARTS

NAMES = {"auto": "this package", "grouped_mm": "PyTorch `grouped_mm`", "scattermoe": "ScatterMoE"}
LAST = 50  # steps whose mean is compared


def report(results: Path) -> str:
    """Write step.md and curve.png below training-step of each device; return the text."""
    texts = []
    records = [r for r in read(results) if r.get("kind") in ("training step", "training curve")]
    for device in dict.fromkeys(r["device"] for r in records):
        mine = [r for r in records if r["device"] == device]
        folder = results / slug(device) / "training-step"
        folder.mkdir(parents=True, exist_ok=True)
        steps = newest([r for r in mine if r["kind"] == "training step"])
        curves = newest([r for r in mine if r["kind"] == "training curve"])
        found = [f"# Training steps, {device}", "Written by `benchmarks/training_step.py`."]
        if steps:
            found += [step_table(steps), *failures(steps), part_table(steps)]
        if curves:
            found += [curve_table(curves), "![Loss of every step](curve.png)"]
            draw(folder / "curve.png", curves)
        text = "\n\n".join(found)
        (folder / "step.md").write_text(f"{text}\n")
        texts.append(text)
    return "\n\n".join(texts) or "There are no records of training steps."


def newest(records: list[Record]) -> list[Record]:
    """The last record of each candidate."""
    keys = ["preset", "backend", "precision", "deterministic", "recompute", "memory", "layers"]
    keys += ["tokens_per_micro_batch", "micro_batches", "steps", "seed"]
    found: dict[Any, Record] = {}
    for r in records:
        same = tuple(r.get(key) for key in keys if r["kind"] == "training curve" or key != "steps")
        found.pop(same, None)
        found[same] = r
    return list(found.values())


def name(r: Record) -> str:
    words = [r["preset"], NAMES.get(r["backend"], r["backend"]), r["precision"]]
    words += ["deterministic"] * r["deterministic"] + ["recompute"] * r["recompute"]
    return ", ".join(words)


def step_table(records: list[Record]) -> str:
    rows = []
    for r in records:
        if "failed" in r:
            continue
        more = r.get("extrapolated")
        rate = (more or r)["tokens_per_second"]
        rows.append((
            name(r),
            r["layers"],
            r["micro_batches"],
            f"{r['micro_batch_ms']:.1f}",
            f"{r['update_ms']:.1f}",
            f"{rate / 1e3:.1f}k" + " (extrapolated)" * bool(more),
            f"{rate * 86400 / 1e9:.2f}B",
            f"{r['peak_gib']:.1f}",
        ))  # fmt: skip
    head = ("training", "layers", "micro-batches", "ms per micro-batch", "ms per update",
            "tokens/s", "tokens per day", "peak GiB")  # fmt: skip
    return table(head, rows)


def failures(records: list[Record]) -> list[str]:
    return [f"{name(r)}, {r['layers']} layers: {r['failed']}" for r in records if "failed" in r]


def part_table(records: list[Record]) -> str:
    """GPU-busy ms of a micro-batch by part."""
    rows = [
        (f"{name(r)}, {r['layers']} layers", *(f"{r['parts_ms'][part]:.1f}" for part in PARTS))
        for r in records
        if "parts_ms" in r
    ]
    return table(("GPU-busy ms", *PARTS), rows)


# --- curves ---------------------------------------------------------------------------------------
def curve_table(records: list[Record]) -> str:
    first = records[0]
    rows = []
    for r in records:
        mean = fmean(r["losses"][-LAST:])
        change = mean / fmean(first["losses"][-LAST:]) - 1
        rows.append((
            f"{name(r)}, seed {r['seed']}",
            r["layers"],
            r["steps"],
            f"{r['losses'][0]:.4f}",
            f"{mean:.4f}",
            None if r is first else f"{change:+.2%}",
        ))  # fmt: skip
    last = f"mean of the last {LAST} losses"
    return table(("curve", "layers", "steps", "first loss", last, f"against {name(first)}"), rows)


def draw(path: Path, records: list[Record]) -> None:
    figure, (loss, apart) = plots.row_of_axes(2, (12, 5.2))
    first = records[0]
    for i, r in enumerate(records):
        style = {**plots.line(i), "marker": "", "linewidth": 1.2}
        steps = range(1, len(r["losses"]) + 1)
        loss.plot(steps, r["losses"], **style, label=f"{name(r)}, seed {r['seed']}")
        if r is not first:
            pairs = zip(r["losses"], first["losses"], strict=False)
            changes = [a - b for a, b in pairs]
            apart.plot(range(1, len(changes) + 1), changes, **style, label=name(r))
    apart.axhline(0, color=plots.MUTED, linewidth=0.8)
    plots.label_axes(loss, "step", "training loss (nats a token)")
    plots.label_axes(apart, "step", f"difference from {name(first)}")
    loss.legend(frameon=False)
    if len(records) > 1:
        apart.legend(frameon=False)
    sizes = f"{first['parameters'] / 1e9:.3g}B parameters, {first['layers']} layers"
    about = f"{sizes}; steps of {first['tokens_per_step']} tokens; {first['device']}"
    plots.finish(figure, path, "The same seed and text in each precision", about)
