"""Tables and pictures of the trainings in `training.py`, made from what they kept alone."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sonicmoe.bench.tables import table
from sonicmoe.train import accounting, plots
from sonicmoe.train.config import TrainConfig
from sonicmoe.train.progress import count, human_bytes

Records = Sequence[Mapping[str, Any]]


def report(folder: Path) -> str:
    """evidence.md and the pictures beside it, from evidence.json; the tables are returned."""
    kept = json.loads((folder / "evidence.json").read_text())
    groups: dict[tuple, list] = {}
    for r in kept["records"]:
        groups.setdefault((r["experiment"], r.get("rows_per_expert")), []).append(r)
    parts = [
        "# Evidence from training",
        f"`{kept['command']}`, {kept['date'][:10]}, {kept['device']}, torch {kept['torch']}, "
        f"triton {kept['triton']}, Python {kept['python']}, commit {kept['commit']}.",
    ]
    for (experiment, rows), group in groups.items():
        parts += _section(experiment, rows, group, folder)
    text = "\n\n".join(parts)
    (folder / "evidence.md").write_text(text + "\n")
    return text


def _section(experiment: str, rows: int | None, group: Records, folder: Path) -> list[str]:
    title = experiment.capitalize() + (f", {rows} rows an expert" if rows else "")
    parts = [f"## {title}"]
    trained = next((r for r in group if "failed" not in r), None)
    if trained:
        config = TrainConfig.from_dict(trained["config"])
        precisions = dict.fromkeys(r["config"]["precision"] for r in group if "config" in r)
        parts.append(
            f"{_in_a_line(trained)}; precision {', '.join(precisions)}, "
            f"compile={str(config.compile).lower()}, "
            f"deterministic={str(config.deterministic).lower()}."
        )
    parts.append(TABLES[experiment](group))
    if experiment in PICTURES and plots.available() and all(r["finished"] for r in group):
        name = f"{experiment}-{rows}.png" if rows else f"{experiment}.png"
        PICTURES[experiment](folder / name, group)
        parts.append(f"![{title}]({name})")
    return parts


def _in_a_line(record: Mapping[str, Any]) -> str:
    config = TrainConfig.from_dict(record["config"])
    m, size = config.model, accounting.parameters(config.model)
    return (
        f"{count(size.total)} parameters ({count(size.active)} met by a token), {m.num_layers} "
        f"layers, {m.experts_per_token} of {m.num_experts} experts; {record['steps']} steps of "
        f"{count(config.tokens_per_step)} tokens, {record['epochs']:.2f} passes over the text; "
        f"{record['device']}"
    )


# --- rounding, precision --------------------------------------------------------------------------
def _paired_table(varied: str, records: Records) -> str:
    """One line for each value of `varied`.

    Differences are between runs of the same seed: mean ± standard error.
    """
    losses: dict[str, dict[str, float]] = {}
    for r in records:
        label, _, seed = r["run"].partition(", seed ")
        losses.setdefault(label, {})[seed] = r["validation_loss"]
    first, base = next(iter(losses.items()))
    lines = []
    for label, by_seed in losses.items():
        changes = [loss / base[seed] - 1 for seed, loss in by_seed.items()]
        lines.append((
            label, *(f"{loss:.4f}" for loss in by_seed.values()),
            f"{sum(by_seed.values()) / len(by_seed):.4f}",
            "" if by_seed is base else _mean_and_error(changes),
            "" if by_seed is base else f"{min(changes):+.2%} … {max(changes):+.2%}",
        ))  # fmt: skip
    header = (varied, *(f"seed {s}" for s in base), "mean", f"against {first}", "by seed")
    return table(header, lines)


def _mean_and_error(changes: Sequence[float]) -> str:
    text = f"{statistics.fmean(changes):+.2%}"
    if len(changes) > 2:
        text += f" ± {statistics.stdev(changes) / math.sqrt(len(changes)):.2%}"
    return text


def _rounding_picture(path: Path, records: Records) -> None:
    curves: dict[str, list] = {}
    for r in records:
        curves.setdefault(r["run"].partition(", seed")[0], []).append(r["validation"])
    rows, tile = records[0]["rows_per_expert"], records[0]["tile"]
    tiles = f"{rows / tile:g} {'tile' if rows == tile else 'tiles'} of {tile}"
    plots.against_first(
        path, curves, f"Token rounding at {rows} rows an expert ({tiles})",
        _in_a_line(records[0]) + "\nValidation always chooses experts by plain top-K. "
        f"Thin: {len(next(iter(curves.values())))} seeds. Thick: their mean.",
    )  # fmt: skip


def _precision_picture(path: Path, records: Records) -> None:
    curves: dict[str, list] = {}
    for r in records:
        curves.setdefault(r["run"].partition(", seed")[0], []).append(r["validation"])
    first, *others = curves
    plots.against_first(
        path, curves, f"Experts in {', '.join(others)} and in {first}",
        f"{_in_a_line(records[0])}\nThin: {len(curves[first])} seeds. Thick: their mean.",
    )  # fmt: skip


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
    plots.on_top(
        path,
        {_IN_WORDS[r["run"]]: r["curve"] for r in records},
        f"The same training computed by {', by '.join(_IN_WORDS[r['run']] for r in records)}",
        _in_a_line(records[0]),
    )


TABLES: dict[str, Callable[[Records], str]] = {
    "rounding": partial(_paired_table, "router"),
    "precision": partial(_paired_table, "precision"),
    "throughput": throughput_table,
    "agreement": _agreement_table,
}
PICTURES = {
    "rounding": _rounding_picture,
    "precision": _precision_picture,
    "agreement": _agreement_picture,
}
