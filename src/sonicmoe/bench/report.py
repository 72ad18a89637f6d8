"""Tables on the terminal, for the run at hand; what was kept goes into the README: `readme`."""

from collections.abc import Sequence

from .energy import Energy
from .kernels import Kernel
from .results import Record
from .stages import StageTime
from .subjects import OURS
from .verify import Check


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they must be; the first one to the left, the others to the right."""
    cells = [list(head), *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def layer_table(records: Sequence[Record]) -> str:
    columns = ("fwd_ms", "bwd_ms", "fwd_bwd_ms", "fwd_bwd_tflops", "dense_share", "busy_fwd_bwd_ms")
    memory = ("kept_mib", "peak_mib")
    head = (
        "subject", "router", "fwd ms", "bwd ms", "fwd+bwd ms", "TFLOP/s", "of dense", "GPU busy ms",
        "kept MiB", "peak MiB",
    )  # fmt: skip
    rows = [
        [record["subject"], record["router"], *(record.get(name) for name in columns + memory)]
        for record in records
    ]
    return table(head, rows)


def check_table(checks: Sequence[Check]) -> str:
    rows = [
        [
            check.tensor,
            f"{check.error:.2e}",
            f"{check.plain:.2e}",
            f"{check.error / check.plain:.3f}" if check.plain else "–",
            "ok" if check.passed else f"FAILS (at most {check.allowed:.2e})",
        ]
        for check in checks
    ]
    return table(("tensor", "error", "plain PyTorch", "ratio", ""), rows)


def kernel_table(kernels: Sequence[Kernel], least_share: float = 0.002) -> str:
    total = sum(kernel.ms for kernel in kernels)
    rows = [
        [kernel.name[:90], f"{kernel.calls:g}", f"{kernel.ms:.4f}", f"{kernel.ms / total:.1%}"]
        for kernel in kernels
        if kernel.ms >= least_share * total
    ]
    return table(("kernel", "launches", "ms", "share"), [*rows, ["all", "", f"{total:.4f}", ""]])


def stage_table(stages: Sequence[StageTime], copy_tb_s: float) -> str:
    """Operators beside the bandwidth of a plain copy."""
    rows = [
        [
            stage.stage,
            f"{stage.ms:.4f}",
            f"{stage.tflops:.1f}" if stage.flops else "–",
            f"{stage.terabytes_per_s:.2f}",
            f"{stage.terabytes_per_s / copy_tb_s:.0%}",
        ]
        for stage in stages
    ]
    return table(("operator", "ms", "TFLOP/s", "TB/s", f"of copy ({copy_tb_s:.2f} TB/s)"), rows)


def energy_table(pairs: Sequence[tuple[Energy, Energy]]) -> str:
    """Each product of ours beside the dense one."""
    rows = [
        [
            ours.name, f"{ours.ms:.3f}", f"{ours.watts:.0f}", f"{ours.mhz:.0f}",
            f"{ours.millijoules:.0f}", ours.picojoules_per_flop,
            f"{dense.ms:.3f}", f"{dense.watts:.0f}", f"{dense.mhz:.0f}",
            f"{dense.millijoules:.0f}", dense.picojoules_per_flop,
        ]
        for ours, dense in pairs
    ]  # fmt: skip
    columns = ("ms", "W", "MHz", "mJ", "pJ/FLOP")
    return table(("product", *columns, *(f"dense {name}" for name in columns)), rows)


def skew_table(records: Sequence[Record]) -> str | None:
    """Our time under skewed routings over that of the even one, where one run has both."""
    ours = [r for r in records if r["subject"] == OURS]
    even = {(r["case"], r["router"]): r["fwd_bwd_ms"] for r in ours if r["routing"] == "uniform"}
    rows = [
        [r["case"], r["routing"], r["router"], f"{r['largest_share']:.1%}", r["fwd_bwd_ms"] / base]
        for r in ours
        if r["routing"] != "uniform" and (base := even.get((r["case"], r["router"])))
    ]
    head = ("case", "routing", "router", "largest expert", "time ÷ uniform")
    return table(head, rows) if rows else None


def figure_table(figures: dict[str, float]) -> str:
    return table(("figure", "value"), list(figures.items()))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
