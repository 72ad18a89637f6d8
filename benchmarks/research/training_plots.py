"""Pictures of several trainings, compared with one of them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from sonicmoe_trainer import plots

Curve = Sequence[tuple[float, float]]  # (step, loss)
Seeds = Mapping[int, Curve]  # of one variant


def against_first(path: Path, curves: Mapping[str, Seeds], title: str, subtitle: str) -> None:
    """Several seeds of several variants: validation loss, and its difference to the first variant
    at the same step and seed."""
    figure, (loss, change) = plots.row_of_axes(2, (12, 5.4))
    base, first = next(iter(curves.items()))
    for i, (name, seeds) in enumerate(curves.items()):
        colour = plots.line(i)["color"]
        changes = _differences(seeds, first)
        for axes, runs, digits in ((loss, seeds, ".3f"), (change, changes, "+.2f")):
            if not runs:
                continue
            mean = _mean(runs)
            for run in runs.values():
                axes.plot(*zip(*run, strict=True), color=colour, linewidth=0.8, alpha=0.45)
            label = f"{name}: {mean[-1][1]:{digits}}"
            axes.plot(*zip(*mean, strict=True), **plots.line(i), linewidth=2, label=label)
    scale = "%"
    if max(map(abs, change.get_ylim())) > 4:  # one is far off, the others should stay apart
        scale = "%, logarithmic beyond ±1"
        change.set_yscale("symlog", linthresh=1)
        ticks = (0, 0.5, 1, 2, 5, 10, 20, 50, 100)
        change.set_yticks([s * t for s in (-1, 1) for t in ticks[s < 0 :]])
        change.yaxis.set_major_formatter("{x:g}")
        change.set_ylim(min(0, *(l.get_ydata().min() for l in change.lines)) * 1.1, None)
    _label_pair(loss, change, f"difference to {base} ({scale})", "difference in %")
    plots.finish(figure, path, title, subtitle)


def paired(
    path: Path, columns: Mapping[str, Mapping[str, Seeds]], title: str, subtitle: str, limit: float
) -> None:
    """Validation loss of several variants, mean over the seeds, a column for each length of run.

    Below it the difference to the first variant in %, mean ± standard error, and lines at ±`limit`.
    """
    figure, grid = plots.grid_of_axes(2, len(columns), (max(12.0, 5.6 * len(columns)), 7.6))
    names = list(dict.fromkeys(name for variants in columns.values() for name in variants))
    for (head, variants), loss, change in zip(columns.items(), *grid, strict=True):
        base, first = next(iter(variants.items()))
        change.axhline(0, color=plots.MUTED, linewidth=0.8)
        for y, label in ((limit, f"±{limit:g}%"), (-limit, None)):
            change.axhline(y, color=plots.MUTED, linewidth=1, linestyle=":", label=label)
        for name, seeds in variants.items():
            line, mean = plots.line(names.index(name)), _mean(seeds)
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
        loss.set_title(f"{head}, {count} seed{'s' * (count > 1)}", color=plots.INK, fontsize=11)
        _label_pair(loss, change, f"difference to {base} (%)", "difference")
    plots.finish(figure, path, title, subtitle)


def _label_pair(loss, change, difference: str, in_legend: str) -> None:
    """Axes of the validation loss, and of its difference to that of the first variant."""
    plots.label_axes(loss, "step", "validation loss (nats a token)")
    plots.label_axes(change, "step", difference)
    for axes, what in ((loss, "validation loss"), (change, in_legend)):
        axes.set_xlim(left=0)
        axes.legend(frameon=False, title=f"{what} at the end, mean", alignment="left")


def on_top(path: Path, curves: Mapping[str, Curve], title: str, subtitle: str) -> None:
    """Loss curves on top of each other, and how far each is from the last of them."""
    figure, (loss, apart) = plots.row_of_axes(2, (12, 5.2))
    *others, last = curves
    for i, (name, curve) in enumerate(curves.items()):
        # Broad below and thin above, so that equal curves are all seen.
        style = {"linewidth": 1.2 + 3 * (len(curves) - 1 - i), "alpha": 1 if name == last else 0.4}
        loss.plot(*zip(*curve, strict=True), color=plots.COLOURS[i], **style, label=name)
    for i, name in enumerate(others):
        difference = [(s, a - b) for (s, a), (_, b) in zip(curves[name], curves[last], strict=True)]
        largest = max(abs(d) for _, d in difference)
        label = f"{name}: at most {largest:.2g}"
        apart.plot(
            *zip(*difference, strict=True), color=plots.COLOURS[i], linewidth=1.2, label=label
        )
    apart.axhline(0, color=plots.MUTED, linewidth=0.8)
    plots.label_axes(loss, "step", "training loss (nats a token)")
    plots.label_axes(apart, "step", f"difference from {last} (nats a token)")
    for axes in (loss, apart):
        axes.legend(frameon=False)
    plots.finish(figure, path, title, subtitle)


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
