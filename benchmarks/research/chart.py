"""The chart at the top of the README: speed and memory of one layer beside its peers."""

from collections.abc import Sequence
from pathlib import Path

from sonicmoe.extras import need
from sonicmoe.tools.candidates import OURS

from . import kept
from .fp8 import KIND
from .fp8_candidates import OURS_FP8
from .results import Record

_INK, _MUTED, _GRID = "#1f2430", "#6b7280", "#e5e7eb"
_COLOURS = {
    OURS: "#2563eb",
    OURS_FP8: "#7c3aed",
    "published": "#f59e0b",
    "scattermoe": "#10b981",
    "grouped_mm": "#9ca3af",
}
_NAMES = {OURS: "this package", OURS_FP8: "this package, FP8"} | {
    key: name.replace("`", "") for key, name in kept.PEERS.items()
}
_MINE = (OURS, OURS_FP8)
_BAR, _GAP = 0.34, 0.22  # in units of the vertical axis


def draw(path: Path, device: str, dtype: str, records: Sequence[Record]) -> bool:
    """Write the PNG; False if no layer was measured beside a peer."""
    layers = {k: f for k, f in kept.newest_layers(records).items() if kept.peers_of(f)}
    if not layers:
        return False
    need("matplotlib", "Drawing a chart").use("Agg")
    from matplotlib import pyplot

    in_fp8 = _in_fp8(records)
    bars = [
        [OURS, *([OURS_FP8] if layer in in_fp8 else []), *kept.peers_of(found)]
        for layer, found in layers.items()
    ]
    tops, height = [], 0.0
    for names in bars:
        tops.append(height)
        height += _BAR * len(names) + _GAP
    size = (11, 0.74 * height + 1.84)
    figure, (speed, memory) = pyplot.subplots(
        1, 2, figsize=size, dpi=150, sharey=True, gridspec_kw={"width_ratios": (1.25, 1)}
    )
    shown = dict.fromkeys(name for name in _NAMES if any(name in names for names in bars))
    for top, (layer, found), names in zip(tops, layers.items(), bars, strict=True):
        for i, name in enumerate(names):
            at = top + i * _BAR
            if name == OURS_FP8:
                _bar(speed, at, *in_fp8[layer])
                continue
            record = found[name]
            _bar(speed, at, record["fwd_bwd_tflops"], name, _speed_label(found, name))
            if record.get("kept_mib"):
                gib = record["kept_mib"] / 1024
                _bar(memory, at, gib, name, f"{gib:.2f} GiB")
        middle = top + (len(names) - 1) * _BAR / 2
        for text, shift, style in (
            (layer.name, -0.12, {"fontweight": "bold", "color": _INK, "fontsize": 10.5}),
            (layer.shape, 0.17, {"color": _MUTED, "fontsize": 8}),
        ):
            speed.text(-0.02, middle + shift, text, ha="right", va="center",
                       transform=speed.get_yaxis_transform(), **style)  # fmt: skip
    speed.set_ylim(height - _GAP, -_BAR)
    _style(speed, "Speed of forward and backward", "TFLOP/s, higher is better", 1.42)
    _style(memory, "Memory kept for the backward pass", "GiB, lower is better", 1.15)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[name]) for name in shown]
    labels = [_NAMES[name] for name in shown]
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False,
                  fontsize=10, labelcolor=_INK)  # fmt: skip
    figure.text(0.012, 1 - 0.12 / size[1], "Training one Mixture-of-Experts layer", va="top",
                fontsize=15, fontweight="bold", color=_INK)  # fmt: skip
    figure.text(
        0.012, 1 - 0.45 / size[1], f"One {device}, {dtype}. Under each layer: tokens, hidden size, "
        "intermediate size, experts, experts per token.\n"
        "FP8 with cached weights is from another run, and compared with bf16 in that run.",
        va="top", fontsize=9.5, color=_MUTED, linespacing=1.4,
    )  # fmt: skip
    figure.subplots_adjust(
        left=0.175, right=0.985, top=1 - 1.22 / size[1], bottom=0.78 / size[1], wspace=0.06
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
    return True


def _in_fp8(records: Sequence[Record]) -> dict[kept.Layer, tuple[float, str, str]]:
    """TFLOP/s, candidate and label of our layer in FP8, for each layer with its newest FP8 run."""
    found = {}
    measured = [r for r in records if r.get("kind") == KIND and "ms" in r]
    for layer, run in kept.newest_runs(measured, candidate=OURS_FP8).items():
        ms = {record["candidate"]: record["ms"] for record in run}
        (ours,) = (record for record in run if record["candidate"] == OURS_FP8)
        label = f"{ours['ms']:.1f} ms"
        if OURS in ms:
            label += f", {ms[OURS] / ours['ms']:.2f}× bf16"
        found[layer] = ours["tflops"], OURS_FP8, label
    return found


def _speed_label(found: dict[str, Record], name: str) -> str:
    ms = f"{found[name]['fwd_bwd_ms']:.1f} ms"
    if name != OURS:
        return ms
    factor = min(kept.speedup(found, peer) or 0 for peer in kept.peers_of(found))
    return f"{ms}, {factor:.2f}× faster" if factor > 1 else ms


def _bar(axes, at: float, value: float, name: str, label: str) -> None:
    axes.barh(at, value, 0.88 * _BAR, color=_COLOURS[name])
    axes.annotate(
        label, (value, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5,
        color=_INK if name in _MINE else _MUTED, fontweight="bold" if name in _MINE else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )  # fmt: skip


def _style(axes, title: str, direction: str, room: float) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=8)
    axes.set_xlabel(direction, loc="left", fontsize=9, color=_MUTED)
    axes.set_xlim(0, room * max((bar.get_width() for bar in axes.patches), default=1))
    axes.set_yticks([])
    axes.tick_params(colors=_MUTED, labelsize=8.5, length=0)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(_MUTED)
