"""Tables: on the terminal for the run at hand, in the README for what was kept."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import bad_argument
from .cases import CASES
from .kernels import Kernel
from .peers import DENSE
from .published import NAME as PUBLISHED
from .results import Record
from .stages import StageTime
from .subjects import OURS
from .verify import Check

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


# --- terminal -------------------------------------------------------------------------------------
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


# --- README ---------------------------------------------------------------------------------------
def update_readme(readme: Path, records: Sequence[Record]) -> None:
    """Replace what stands between the two markers by a table of the newest kept results."""
    text = readme.read_text() if readme.exists() else ""
    if BEGIN not in text or END not in text:
        raise bad_argument(
            "report", f"a file with the lines {BEGIN} and {END}", str(readme),
            "Put the two lines where the table should stand.",
        )  # fmt: skip
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    readme.write_text(f"{before}{BEGIN}\n{readme_table(records)}\n{END}{after}")


def readme_table(records: Sequence[Record]) -> str:
    """One table a device: every case that was measured, won or lost."""
    newest: dict[str, dict[str, dict[str, Record]]] = {}
    for record in records:
        whole = record.get("router") == "in" and "fwd_bwd_ms" in record
        if whole and record.get("routing") == "uniform":
            cases = newest.setdefault(record["device"], {})
            cases.setdefault(record["case"], {})[record["subject"]] = record
    tables = [
        _device_table(device, {name: found for name, found in cases.items() if OURS in found})
        for device, cases in sorted(newest.items())
    ]
    return "\n\n".join(tables) if tables else "No results are kept yet."


_PEER_COLUMNS = {
    DENSE: "dense products alone",
    PUBLISHED: "published SonicMoE",
    "scattermoe": "ScatterMoE",
    "grouped_mm": "PyTorch `grouped_mm`",
}


def _device_table(device: str, cases: dict[str, dict[str, Record]]) -> str:
    order = sorted(cases, key=lambda name: list(CASES).index(name) if name in CASES else len(CASES))
    peers = [peer for peer in _PEER_COLUMNS if any(peer in found for found in cases.values())]
    head = [
        "case (T,H,I,E,K)",
        "sonicmoe",
        *(_PEER_COLUMNS[p] for p in peers),
        "of dense",
        "kept MiB",
    ]
    lines = [_markdown_row(head), _markdown_row(["---"] * len(head))]
    for name in order:
        found = cases[name]
        layers = [r["fwd_bwd_ms"] for subject, r in found.items() if subject != DENSE]
        best = min(layers)
        ours = found[OURS]
        label = name if name == ours["shape"] else f"{name} ({ours['shape']})"
        share, kept = ours.get("dense_share"), ours.get("kept_mib")
        cells = [label, _times(ours, best), *(_times(found.get(peer), best) for peer in peers)]
        cells += [_or_dash(share, "{:.2f}".format), _or_dash(kept, "{:.0f}".format)]
        lines.append(_markdown_row(cells))
    return "\n".join([*lines, "", _caption(device, [found[OURS] for found in cases.values()])])


def _caption(device: str, records: Sequence[Record]) -> str:
    newest = max(records, key=lambda record: record["date"])
    slowest_share = min((r["dense_share"] for r in records if r.get("dense_share")), default=None)
    lowest = "" if slowest_share is None else f" Lowest share of dense: {slowest_share:.2f}."
    return (
        f"{device}, {newest['dtype']}, the whole layer with its router: ms forward / forward and "
        f"backward, medians, the fastest layer in bold.{lowest} torch {newest['torch']}, "
        f"triton {newest['triton']}, {newest['date'][:10]}, `{newest['command']}`."
    )


def _times(record: Record | None, best: float) -> str:
    if record is None:
        return "–"
    both = f"{record['fwd_bwd_ms']:.2f}"
    won = record["subject"] != DENSE and record["fwd_bwd_ms"] <= best
    return f"{record['fwd_ms']:.2f} / {f'**{both}**' if won else both}"


def _or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "–" if value is None else form(value)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
