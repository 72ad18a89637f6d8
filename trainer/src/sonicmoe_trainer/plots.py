"""Plots of runs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INK, MUTED, _GRID = "#1f2430", "#6b7280", "#e5e7eb"
COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#be185d")
_POINTS = {"textcoords": "offset points"}
Records = Sequence[Mapping[str, Any]]


def loss_curve(
    path: Path, records: Records, title: str, subtitle: str, vocab_size: int, target: float | None
) -> None:
    """Training and validation loss against the step."""
    figure, (axes,) = row_of_axes(1, (8, 5))
    blue, orange, green = COLOURS[:3]
    label = "training (mean of the interval)"
    axes.plot(*_series(records, "train", "step"), color=blue, linewidth=1.6, label=label)
    steps, losses = _series(records, "validation", "step")
    if steps:
        style = {"color": orange, "linewidth": 1.2, "marker": "o", "markersize": 5}
        axes.plot(steps, losses, **style, label="validation (held-out documents)")
        end, style = (steps[-1], losses[-1]), {"color": orange, "fontweight": "bold"}
        axes.annotate(f"{losses[-1]:.2f}", end, xytext=(6, 6), **_POINTS, **style, ha="left")
    guess = math.log(vocab_size)
    axes.axhline(guess, color=MUTED, linewidth=1, linestyle=":")
    text = f"uniform guess among {vocab_size} tokens: {guess:.2f}"
    place = {"xycoords": ("axes fraction", "data"), "xytext": (-4, 4), "ha": "right"} | _POINTS
    axes.annotate(text, (1, guess), **place, color=MUTED, fontsize=9)
    if target is not None:
        label = f"goal of this run: {target:g}"
        axes.axhline(target, color=green, linewidth=1, linestyle="--", label=label)
    axes.set_xlim(left=0)
    axes.margins(x=0.04)
    label_axes(axes, "step", "loss (nats per token)")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.93))
    finish(figure, path, title, subtitle)


def comparison(path: Path, runs: Mapping[str, Records], title: str, subtitle: str) -> None:
    """Validation loss (and training loss, thin) of several runs against step and against time."""
    figure, (by_step, by_time) = row_of_axes(2, (12, 5.2))
    lowest, highest = math.inf, 0.0
    for i, (name, records) in enumerate(runs.items()):
        colour = line(i)["color"]
        for axes, against in ((by_step, "step"), (by_time, "seconds")):
            axes.plot(*_series(records, "train", against), color=colour, linewidth=0.8, alpha=0.35)
            x, y = _series(records, "validation", against)
            label = f"{name}: {y[-1]:.3f}" if y and axes is by_step else None
            axes.plot(x, y, **line(i), linewidth=1.8, label=label)
        trained = _series(records, "train", "step")[1]
        lowest, highest = min([lowest, *trained, *y]), max([highest, *trained[2:], *y])
    for axes in (by_step, by_time):
        axes.set_xlim(left=0)
        if math.isfinite(lowest) and highest > lowest:
            axes.set_ylim(lowest - 0.04 * (highest - lowest), highest + 0.04 * (highest - lowest))
    label_axes(by_step, "step", "loss (nats per token)")
    label_axes(by_time, "training time (s)", "")
    by_step.legend(frameon=False, title="validation loss at the end", alignment="left")
    text = "dots: validation, always with plain top-K\nthin lines: training"
    corner = {"xycoords": "axes fraction", "xytext": (-6, -6), "ha": "right", "va": "top"} | _POINTS
    by_time.annotate(text, (1, 1), **corner, color=MUTED, fontsize=9)
    finish(figure, path, title, subtitle)


def line(i: int) -> dict[str, Any]:
    """Style of the i-th curve. Later ones have longer gaps, so that coinciding ones are visible."""
    style = "-" if i == 0 else (0, (5, 1.5 + 1.5 * i))
    colour = COLOURS[i % len(COLOURS)]
    return {"color": colour, "linestyle": style, "marker": "o", "markersize": 3.5}


def _series(records: Records, kind: str, against: str) -> tuple[list[float], list[float]]:
    chosen = [r for r in records if r["kind"] == kind]
    return [r[against] for r in chosen], [r["loss"] for r in chosen]


def row_of_axes(columns: int, size: tuple[float, float]):
    figure, grid = grid_of_axes(1, columns, size)
    return figure, grid[0]


def grid_of_axes(rows: int, columns: int, size: tuple[float, float]):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, dpi=130, squeeze=False)


def label_axes(axes, x: str, y: str) -> None:
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED)
    axes.xaxis.get_major_locator().set_params(integer=x == "step")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)


def finish(figure, path: Path, title: str, subtitle: str) -> None:
    from matplotlib import pyplot

    height = figure.get_figheight()
    below_title, top = 1 - 0.36 / height, 1 - (0.48 + 0.19 * len(subtitle.splitlines())) / height
    figure.text(0.02, 1 - 0.08 / height, title, va="top", color=INK, fontsize=13, fontweight="bold")
    figure.text(0.02, below_title, subtitle, va="top", color=MUTED, fontsize=9.5, linespacing=1.4)
    figure.tight_layout(rect=(0, 0, 1, top))
    figure.savefig(path)
    pyplot.close(figure)
