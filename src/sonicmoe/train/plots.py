"""Pictures of runs, each to be understood on its own."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ..extras import have, need

_INK, _MUTED, _GRID = "#1f2430", "#6b7280", "#e5e7eb"
_COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#be185d")
_POINTS = {"textcoords": "offset points"}
Records = Sequence[Mapping[str, Any]]
Curve = Sequence[tuple[float, float]]  # (step, loss)
Seeds = Mapping[int, Curve]  # of one variant


def available() -> bool:
    return have("matplotlib") is not None


def loss_curve(
    path: Path, records: Records, title: str, subtitle: str, vocab_size: int, target: float | None
) -> None:
    """Training and validation loss against the step."""
    figure, (axes,) = _figure(1, (8, 5))
    blue, orange, green = _COLOURS[:3]
    label = "training (mean of the interval)"
    axes.plot(*_series(records, "train", "step"), color=blue, linewidth=1.6, label=label)
    steps, losses = _series(records, "validation", "step")
    if steps:
        style = {"color": orange, "linewidth": 1.2, "marker": "o", "markersize": 5}
        axes.plot(steps, losses, **style, label="validation (held-out documents)")
        end, style = (steps[-1], losses[-1]), {"color": orange, "fontweight": "bold"}
        axes.annotate(f"{losses[-1]:.2f}", end, xytext=(6, 6), **_POINTS, **style, ha="left")
    guess = math.log(vocab_size)
    axes.axhline(guess, color=_MUTED, linewidth=1, linestyle=":")
    text = f"guessing evenly among {vocab_size} tokens: {guess:.2f}"
    place = {"xycoords": ("axes fraction", "data"), "xytext": (-4, 4), "ha": "right"} | _POINTS
    axes.annotate(text, (1, guess), **place, color=_MUTED, fontsize=9)
    if target is not None:
        label = f"goal of this run: {target:g}"
        axes.axhline(target, color=green, linewidth=1, linestyle="--", label=label)
    axes.set_xlim(left=0)
    axes.margins(x=0.04)
    _label(axes, "step", "loss (nats a token)")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.93))
    _finish(figure, path, title, subtitle)


def comparison(path: Path, runs: Mapping[str, Records], title: str, subtitle: str) -> None:
    """Validation loss (and training loss, thin) of several runs against step and against time."""
    figure, (by_step, by_time) = _figure(2, (12, 5.2))
    lowest, highest = math.inf, 0.0
    for i, (name, records) in enumerate(runs.items()):
        colour = _line(i)["color"]
        for axes, against in ((by_step, "step"), (by_time, "seconds")):
            axes.plot(*_series(records, "train", against), color=colour, linewidth=0.8, alpha=0.35)
            x, y = _series(records, "validation", against)
            label = f"{name}: {y[-1]:.3f}" if y and axes is by_step else None
            axes.plot(x, y, **_line(i), linewidth=1.8, label=label)
        trained = _series(records, "train", "step")[1]
        lowest, highest = min([lowest, *trained, *y]), max([highest, *trained[2:], *y])
    for axes in (by_step, by_time):
        axes.set_xlim(left=0)
        if math.isfinite(lowest) and highest > lowest:
            axes.set_ylim(lowest - 0.04 * (highest - lowest), highest + 0.04 * (highest - lowest))
    _label(by_step, "step", "loss (nats a token)")
    _label(by_time, "training time (s)", "")
    by_step.legend(frameon=False, title="validation loss at the end", alignment="left")
    text = "dots: validation, always with plain top-K\nthin lines: training"
    corner = {"xycoords": "axes fraction", "xytext": (-6, -6), "ha": "right", "va": "top"} | _POINTS
    by_time.annotate(text, (1, 1), **corner, color=_MUTED, fontsize=9)
    _finish(figure, path, title, subtitle)


def against_first(path: Path, curves: Mapping[str, Seeds], title: str, subtitle: str) -> None:
    """Several seeds of several variants: validation loss, and its difference to the first variant
    at the same step and seed."""
    figure, (loss, change) = _figure(2, (12, 5.4))
    base, first = next(iter(curves.items()))
    for i, (name, seeds) in enumerate(curves.items()):
        colour = _line(i)["color"]
        changes = _differences(seeds, first)
        for axes, runs, digits in ((loss, seeds, ".3f"), (change, changes, "+.2f")):
            if not runs:
                continue
            mean = _mean(runs)
            for run in runs.values():
                axes.plot(*zip(*run, strict=True), color=colour, linewidth=0.8, alpha=0.45)
            label = f"{name}: {mean[-1][1]:{digits}}"
            axes.plot(*zip(*mean, strict=True), **_line(i), linewidth=2, label=label)
    scale = "%"
    if max(map(abs, change.get_ylim())) > 4:  # one is far off, the others should stay apart
        scale = "%, logarithmic beyond ±1"
        change.set_yscale("symlog", linthresh=1)
        ticks = (0, 0.5, 1, 2, 5, 10, 20, 50, 100)
        change.set_yticks([s * t for s in (-1, 1) for t in ticks[s < 0 :]])
        change.yaxis.set_major_formatter("{x:g}")
        change.set_ylim(min(0, *(l.get_ydata().min() for l in change.lines)) * 1.1, None)
    _label(loss, "step", "validation loss (nats a token)")
    _label(change, "step", f"difference to {base} ({scale})")
    for axes, what in ((loss, "validation loss"), (change, "difference in %")):
        axes.set_xlim(left=0)
        axes.legend(frameon=False, title=f"{what} at the end, mean", alignment="left")
    _finish(figure, path, title, subtitle)


def paired(
    path: Path, columns: Mapping[str, Mapping[str, Seeds]], title: str, subtitle: str, limit: float
) -> None:
    """Validation loss of several variants, mean over the seeds, a column for each length of run.

    Below it the difference to the first variant in %, mean ± standard error, and lines at ±`limit`.
    """
    figure, grid = _grid(2, len(columns), (max(8.0, 5.6 * len(columns)), 7.6))
    names = list(dict.fromkeys(name for variants in columns.values() for name in variants))
    for (head, variants), loss, change in zip(columns.items(), *grid, strict=True):
        base, first = next(iter(variants.items()))
        change.axhline(0, color=_MUTED, linewidth=0.8)
        for y, label in ((limit, f"±{limit:g}%"), (-limit, None)):
            change.axhline(y, color=_MUTED, linewidth=1, linestyle=":", label=label)
        for name, seeds in variants.items():
            line, mean = _line(names.index(name)), _mean(seeds)
            label = f"{name}: {mean[-1][1]:.3f}"
            loss.plot(*zip(*mean, strict=True), **line, linewidth=1.6, label=label)
            changes = _differences(seeds, first)
            if name == base or not changes:
                continue
            steps, means = zip(*_mean(changes), strict=True)
            label = f"{name}: {means[-1]:+.2f}%"
            change.plot(steps, means, **line, linewidth=1.6, label=label)
            if len(changes) > 2:
                errors = [stdev(ys) / math.sqrt(len(ys)) for ys in _by_step(changes)]
                low, high = (
                    [m + s * e for m, e in zip(means, errors, strict=True)] for s in (-1, 1)
                )
                change.fill_between(steps, low, high, color=line["color"], alpha=0.15, linewidth=0)
        count = max(map(len, variants.values()))
        loss.set_title(f"{head}, {count} seed{'s' * (count > 1)}", color=_INK, fontsize=11)
        _label(loss, "step", "validation loss (nats a token)")
        _label(change, "step", f"difference to {base} (%)")
        for axes, what in ((loss, "validation loss"), (change, "difference")):
            axes.set_xlim(left=0)
            axes.legend(frameon=False, title=f"{what} at the end, mean", alignment="left")
    _finish(figure, path, title, subtitle)


def on_top(path: Path, curves: Mapping[str, Curve], title: str, subtitle: str) -> None:
    """Loss curves on top of each other, and how far each is from the last of them."""
    figure, (loss, apart) = _figure(2, (12, 5.2))
    *others, last = curves
    for i, (name, curve) in enumerate(curves.items()):
        # Broad below and thin above, so that equal curves are all seen.
        style = {"linewidth": 1.2 + 3 * (len(curves) - 1 - i), "alpha": 1 if name == last else 0.4}
        loss.plot(*zip(*curve, strict=True), color=_COLOURS[i], **style, label=name)
    for i, name in enumerate(others):
        difference = [(s, a - b) for (s, a), (_, b) in zip(curves[name], curves[last], strict=True)]
        largest = max(abs(d) for _, d in difference)
        label = f"{name}: at most {largest:.2g}"
        apart.plot(*zip(*difference, strict=True), color=_COLOURS[i], linewidth=1.2, label=label)
    apart.axhline(0, color=_MUTED, linewidth=0.8)
    _label(loss, "step", "training loss (nats a token)")
    _label(apart, "step", f"difference from {last} (nats a token)")
    for axes in (loss, apart):
        axes.legend(frameon=False)
    _finish(figure, path, title, subtitle)


def _line(i: int) -> dict[str, Any]:
    """The i-th of several curves. Those that coincide stay visible: later ones have longer gaps."""
    style = "-" if i == 0 else (0, (5, 1.5 + 1.5 * i))
    colour = _COLOURS[i % len(_COLOURS)]
    return {"color": colour, "linestyle": style, "marker": "o", "markersize": 3.5}


def _differences(seeds: Seeds, base: Seeds) -> dict[int, Curve]:
    """In %, to the curve of the same seed, where there is one."""
    return {
        seed: [(s, 100 * (y / z - 1)) for (s, y), (_, z) in zip(curve, base[seed], strict=True)]
        for seed, curve in seeds.items()
        if seed in base
    }


def _mean(runs: Seeds) -> list[tuple[float, float]]:
    """Of curves with the same steps."""
    steps = [step for step, _ in next(iter(runs.values()))]
    return [(step, fmean(ys)) for step, ys in zip(steps, _by_step(runs), strict=True)]


def _by_step(runs: Seeds) -> list[list[float]]:
    """The values of all curves at each step."""
    return [[y for _, y in points] for points in zip(*runs.values(), strict=True)]


def _series(records: Records, kind: str, against: str) -> tuple[list[float], list[float]]:
    chosen = [r for r in records if r["kind"] == kind]
    return [r[against] for r in chosen], [r["loss"] for r in chosen]


def _figure(columns: int, size: tuple[float, float]):
    figure, grid = _grid(1, columns, size)
    return figure, grid[0]


def _grid(rows: int, columns: int, size: tuple[float, float]):
    matplotlib = need("matplotlib", "Drawing a picture")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, dpi=130, squeeze=False)


def _label(axes, x: str, y: str) -> None:
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED)
    axes.xaxis.get_major_locator().set_params(integer=x == "step")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_MUTED)


def _finish(figure, path: Path, title: str, subtitle: str) -> None:
    from matplotlib import pyplot

    height = figure.get_figheight()
    below_title, top = 1 - 0.36 / height, 1 - (0.48 + 0.19 * len(subtitle.splitlines())) / height
    figure.text(
        0.02, 1 - 0.08 / height, title, va="top", color=_INK, fontsize=13, fontweight="bold"
    )
    figure.text(0.02, below_title, subtitle, va="top", color=_MUTED, fontsize=9.5, linespacing=1.4)
    figure.tight_layout(rect=(0, 0, 1, top))
    figure.savefig(path)
    pyplot.close(figure)
