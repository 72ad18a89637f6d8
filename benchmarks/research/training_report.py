"""Tables and pictures of the trainings in `training.py`, made from what they kept alone."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sonicmoe.tools.tables import table
from sonicmoe_trainer import accounting
from sonicmoe_trainer.config import TrainConfig
from sonicmoe_trainer.progress import count, human_bytes

from . import training_plots
from .finetune import BASE, ERRORS, TUNED

Records = Sequence[Mapping[str, Any]]
LAST = 3  # validations of a fine-tuning, whose mean is compared
PRECISION_LIMIT = 0.0025  # of the validation loss: what another precision may add to it


def report(folder: Path) -> str:
    """evidence.md and the pictures beside it, from evidence.json; the tables are returned."""
    kept = json.loads((folder / "evidence.json").read_text())
    groups: dict[tuple, list] = {}
    for r in kept["records"]:
        groups.setdefault((r["experiment"], r.get("rows_per_expert")), []).append(r)
    parts = ["# Evidence from training"]
    parts += [
        f"`{o['command']}`, {o['date'][:10]}, {o['device']}, torch {o['torch']}, "
        f"triton {o['triton']}, Python {o['python']}, commit {o['commit']}."
        for o in origins(kept, kept["records"])
    ]
    for (experiment, rows), group in groups.items():
        parts += _section(experiment, rows, group, folder)
    text = "\n\n".join(parts)
    (folder / "evidence.md").write_text(text + "\n")
    return text


def origins(kept: Mapping[str, Any], records: Records) -> list[Mapping[str, Any]]:
    """The provenance of the commands that made `records`, oldest first."""
    dates = {record.get("date", kept["date"]) for record in records}
    return [origin for origin in (*kept.get("earlier", ()), kept) if origin["date"] in dates]


def _section(experiment: str, rows: int | None, group: Records, folder: Path) -> list[str]:
    title = experiment.capitalize() + (f", {rows} rows an expert" if rows else "")
    parts = [f"## {title}"]
    trained = [r for r in group if r.get("finished")]
    if trained and "config" in trained[0]:
        config = TrainConfig.from_dict(trained[0]["config"])
        precisions = dict.fromkeys(r["config"]["precision"] for r in trained)
        parts.append(
            f"{_in_a_line(trained)}; precision {', '.join(precisions)}, "
            f"compile={str(config.compile).lower()}, "
            f"deterministic={str(config.deterministic).lower()}."
        )
    if experiment == "throughput":
        return [*parts, throughput_table(group)]
    if trained:
        parts.append(TABLES[experiment](trained))
    if left_out := [r for r in group if not r.get("finished")]:
        parts.append("\n".join(f"- {r['run']}: {r.get('failed', 'stopped')}" for r in left_out))
    if trained and experiment in PICTURES:
        name = f"{experiment}-{rows}.png" if rows else f"{experiment}.png"
        PICTURES[experiment](folder / name, trained)
        parts.append(f"![{title}]({name})")
    return parts


def _in_a_line(records: Records) -> str:
    config = TrainConfig.from_dict(records[0]["config"])
    m, size = config.model, accounting.parameters(config.model)
    lengths = dict(sorted((r["steps"], f"{r['epochs']:.2f}") for r in records))
    return (
        f"{count(size.total)} parameters ({count(size.active)} met by a token), {m.num_layers} "
        f"layers, {m.experts_per_token} of {m.num_experts} experts; {_joined(lengths)} steps of "
        f"{count(config.tokens_per_step)} tokens, {_joined(lengths.values())} passes over the "
        f"text; {records[0]['device']}"
    )


def _joined(values: Iterable[object]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last


# --- rounding -------------------------------------------------------------------------------------
Variants = dict[str, dict[int, Mapping[str, Any]]]


def _by_variant(records: Records) -> Variants:
    """The record of each seed, by variant; the first variant is the one to compare with."""
    found: Variants = {}
    for r in records:
        label = r["run"].partition(", seed ")[0]
        found.setdefault(label, {})[r["config"]["seed"]] = r
    return found


def _changes(seeds: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]]) -> dict:
    """Relative difference in validation loss to the run of the same seed, where there is one."""
    loss = "validation_loss"
    return {s: r[loss] / base[s][loss] - 1 for s, r in seeds.items() if s in base}


def _rounding_table(records: Records) -> str:
    """One line for each router; differences are mean ± standard error over the seeds."""
    variants = _by_variant(records)
    first, base = next(iter(variants.items()))
    seeds = list(dict.fromkeys(seed for runs in variants.values() for seed in runs))
    lines = []
    for label, runs in variants.items():
        losses = {seed: r["validation_loss"] for seed, r in runs.items()}
        changes = list(_changes(runs, base).values()) if runs is not base else []
        lines.append((
            label, *(f"{losses[s]:.4f}" if s in losses else None for s in seeds),
            f"{statistics.fmean(losses.values()):.4f}",
            _mean_and_error(changes) if changes else "",
            f"{min(changes):+.2%} … {max(changes):+.2%}" if changes else "",
        ))  # fmt: skip
    header = ("router", *(f"seed {s}" for s in seeds), "mean", f"against {first}", "by seed")
    return table(header, lines)


def _mean_and_error(changes: Sequence[float]) -> str:
    text = f"{statistics.fmean(changes):+.2%}"
    return f"{text} ± {_standard_error(changes):.2%}" if len(changes) > 2 else text


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _validation(variants: Variants) -> dict[str, dict[int, Any]]:
    return {
        label: {seed: r["validation"] for seed, r in runs.items()}
        for label, runs in variants.items()
    }


def _rounding_picture(path: Path, records: Records) -> None:
    curves = _validation(_by_variant(records))
    rows, tile = records[0]["rows_per_expert"], records[0]["tile"]
    tiles = f"{rows / tile:g} {'tile' if rows == tile else 'tiles'} of {tile}"
    training_plots.against_first(
        path, curves, f"Token rounding at {rows} rows an expert ({tiles})",
        _in_a_line(records) + "\nValidation always chooses experts by plain top-K. "
        f"Thin: {len(next(iter(curves.values())))} seeds. Thick: their mean.",
    )  # fmt: skip


# --- precision ------------------------------------------------------------------------------------
def _by_length(records: Records) -> dict[int, Variants]:
    lengths: dict[int, list] = {}
    for r in sorted(records, key=lambda r: r["steps"]):
        lengths.setdefault(r["steps"], []).append(r)
    return {steps: _by_variant(found) for steps, found in lengths.items()}


def precision_table(records: Records) -> str:
    """One line for each length and variant; differences are paired by seed, worst is highest."""
    lines, firsts = [], []
    for steps, variants in _by_length(records).items():
        first, base = next(iter(variants.items()))
        firsts.append(first)
        for label, runs in variants.items():
            mean = statistics.fmean(r["validation_loss"] for r in runs.values())
            line = [steps, label, f"{mean:.4f}", "", "", "", "", len(runs)]
            changes = _changes(runs, base)
            if label != first and changes:
                change, worst = statistics.fmean(changes.values()), max(changes.values())
                error = verdict = None  # of one or two seeds
                if len(changes) > 2:
                    error = f"{_standard_error([*changes.values()]):.2%}"
                    verdict = "yes" if abs(change) <= PRECISION_LIMIT else "no"
                line[3:7] = [f"{change:+.2%}", error, f"{worst:+.2%}", verdict]
            lines.append(line)
    return table(
        ("steps", "precision", "validation loss", f"against {' or '.join(dict.fromkeys(firsts))}",
         "standard error", "worst seed", f"mean within {PRECISION_LIMIT:.2%}", "runs"), lines,
    )  # fmt: skip


def _precision_picture(path: Path, records: Records, what: str = "Experts") -> None:
    columns = {f"{s} steps": _validation(v) for s, v in _by_length(records).items()}
    first, *others = dict.fromkeys(label for variants in columns.values() for label in variants)
    training_plots.paired(
        path, columns, f"{what} in {_joined(others or [first])}, compared with {first}",
        f"{_in_a_line(records)}\nMean over the seeds, shaded: ± its standard error.",
        100 * PRECISION_LIMIT,
    )  # fmt: skip


# --- fine-tuning ----------------------------------------------------------------------------------
def base_table(records: Records) -> str:
    """How large the outliers are in each stage of the model that is fine-tuned."""
    lines: list[tuple] = []
    for r in records:
        if "planted" in r:
            row = f"a row of W1 and of W2 × {r['factor']:g}"
            lines.append((row, "", "", *_ratios(r["planted"])))
        lines.append((r["run"], r["steps"], f"{r['validation_loss']:.4f}", *_ratios(r["outliers"])))
    return table(
        ("model", "steps", "validation loss", "largest ÷ median row of W1", "of W2"), lines
    )


def _ratios(outliers: Mapping[str, float]) -> tuple[str, str]:
    return f"{outliers['w1']:.1f}", f"{outliers['w2']:.1f}"


def errors_table(records: Records) -> str:
    """One line for each source and variant: the worst layer, and over tokens, rows or columns."""
    names = {"output": "output", "dx": "dX", "dw1": "dW1", "dw2": "dW2"}
    lines = []
    for r in records:
        cells = [
            " / ".join(f"{e[kind]:.1%}" for kind in ("norm", "median", "p90"))
            for e in map(r["together"].__getitem__, names)
        ]
        lines.append((r["source"], r["variant"], *cells))
    return table(("source", "precision", *names.values()), lines)


def finetune_table(records: Records) -> str:
    """As `precision_table`, of the mean of the last validations."""
    return precision_table([_averaged(r) for r in records])


def _averaged(record: Mapping[str, Any]) -> dict[str, Any]:
    last = [loss for _, loss in record["validation"][-LAST:]]
    return {**record, "validation_loss": statistics.fmean(last)}


def _finetune_picture(path: Path, records: Records) -> None:
    _precision_picture(path, records, "Fine-tuning with experts")


# --- throughput -----------------------------------------------------------------------------------
def throughput_table(records: Records) -> str:
    rate = next((r["tokens_per_second"] for r in records if "failed" not in r), 1.0)
    lines = []
    for r in records:
        if "failed" in r:
            lines.append((r["run"], r["failed"], "", "", ""))
            continue
        lines.append((
            r["run"], count(r["tokens_per_second"]), f"{r['tokens_per_second'] / rate:.2f}",
            f"{r['peak_share']:.1%}" if r["peak_share"] is not None else "–",
            human_bytes(r["peak_memory"]) if r["peak_memory"] else "–",
        ))  # fmt: skip
    return table(
        ("backend", "tokens/s", "relative speed", "fraction of peak FLOP/s", "peak memory"), lines
    )


# --- agreement ------------------------------------------------------------------------------------
_IN_WORDS = {
    "auto": "SonicMoE",
    "sonicmoe": "SonicMoE's kernels",
    "torch": "plain PyTorch",
    "grouped_mm": "PyTorch's grouped_mm",
    "scattermoe": "ScatterMoE",
}


def _agreement_table(records: Records) -> str:
    base = dict(records[-1]["curve"])
    lines = []
    for r in records:
        apart = [abs(loss - base[step]) for step, loss in r["curve"]]
        lines.append((
            r["run"], f"{r['curve'][0][1]:.5f}", f"{r['curve'][-1][1]:.5f}",
            f"{r['validation_loss']:.5f}", f"{max(apart):.2g}", count(r["tokens_per_second"]),
        ))  # fmt: skip
    return table(
        ("backend", "first loss", "last loss", "validation loss", "farthest from the last",
         "tokens/s"), lines,
    )  # fmt: skip


def _agreement_picture(path: Path, records: Records) -> None:
    training_plots.on_top(
        path,
        {_IN_WORDS[r["run"]]: r["curve"] for r in records},
        f"The same training computed by {', by '.join(_IN_WORDS[r['run']] for r in records)}",
        _in_a_line(records),
    )


TABLES: dict[str, Callable[[Records], str]] = {
    "rounding": _rounding_table,
    "precision": precision_table,
    "throughput": throughput_table,
    "agreement": _agreement_table,
    BASE: base_table,
    ERRORS: errors_table,
    TUNED: finetune_table,
}
PICTURES = {
    "rounding": _rounding_picture,
    "precision": _precision_picture,
    "agreement": _agreement_picture,
    TUNED: _finetune_picture,
}
