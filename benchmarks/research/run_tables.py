"""Tables that a run prints on the terminal."""

from collections.abc import Sequence

from sonicmoe.tools.candidates import OURS
from sonicmoe.tools.tables import table

from .kernels import Kernel
from .per_op import OpTime
from .results import Record


def layer_table(records: Sequence[Record]) -> str:
    columns = ("fwd_ms", "bwd_ms", "fwd_bwd_ms", "fwd_bwd_tflops", "dense_share", "busy_fwd_bwd_ms")
    memory = ("kept_mib", "peak_mib")
    times = ("fwd ms", "bwd ms", "fwd+bwd ms", "TFLOP/s", "fraction of dense cuBLAS", "GPU busy ms")
    head = ("candidate", "router", *times, "kept MiB", "peak MiB")
    rows = [
        [record["candidate"], record["router"], *(record.get(name) for name in columns + memory)]
        for record in records
    ]
    return table(head, rows)


def kernel_table(kernels: Sequence[Kernel], smallest_share: float = 0.002) -> str:
    total = sum(kernel.ms for kernel in kernels)
    rows = [
        [kernel.name[:90], f"{kernel.calls:g}", f"{kernel.ms:.4f}", f"{kernel.ms / total:.1%}"]
        for kernel in kernels
        if kernel.ms >= smallest_share * total
    ]
    return table(("kernel", "launches", "ms", "share"), [*rows, ["all", "", f"{total:.4f}", ""]])


def per_op_table(ops: Sequence[OpTime], copy_tb_s: float) -> str:
    """Per-op timing, with bandwidth as a fraction of that of a device copy."""
    rows = [
        [
            op.name,
            f"{op.ms:.4f}",
            f"{op.tflops:.1f}" if op.flops else "–",
            f"{op.terabytes_per_s:.2f}",
            f"{op.terabytes_per_s / copy_tb_s:.0%}",
        ]
        for op in ops
    ]
    return table(
        ("operator", "ms", "TFLOP/s", "TB/s", f"fraction of copy ({copy_tb_s:.2f} TB/s)"), rows
    )


def skew_table(records: Sequence[Record]) -> str | None:
    """Our time with skewed routing divided by that with uniform routing, from one run."""
    ours = [r for r in records if r["candidate"] == OURS]
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
