"""Tables of LoRA on packed experts, alone and beside other packages."""

from collections.abc import Sequence

from sonicmoe.tools.tables import table

from .results import Record
from .section import Section, form, newest


def packed(records: Sequence[Record]) -> Section | None:
    found = newest(records, "packed", "layer", "tokens")
    if not found:
        return None
    found.sort(key=lambda r: (r["layer"], r["tokens"]))
    names = [n for n in dict.fromkeys(n for r in found for n in r["÷ bf16"]) if n != "bf16"]
    rows = []
    for r in found:
        shares = [form(r["÷ bf16"].get(name), "{:.2f}") for name in names]
        rows.append((r["layer"], r["tokens"], f"{r['ms']['bf16']:.2f}", *shares))
    caption = "A LoRA step of one layer, rank 16: ms on weights in bf16; times divided by it."
    head = ("layer", "tokens", "bf16, ms", *names)
    return Section("LoRA on packed experts", caption, table(head, rows), found)


def packed_peers(records: Sequence[Record]) -> Section | None:
    found = newest(records, "packed peers", "layer", "format", "tokens")
    if not found:
        return None
    found.sort(key=lambda r: (r["layer"], r["format"], r["tokens"]))
    rows: list[tuple] = []
    left_out: dict[tuple, str] = {}
    for r in found:
        case = (r["layer"], r["format"], r["tokens"])
        for name, ms in sorted(r["ms"].items(), key=lambda item: item[1]):
            share, peak = r["÷ ours to bf16"][name], r["peak GiB"][name]
            rows.append((*case, name, f"{ms:.2f}", f"{share:.2f}", f"{peak:.1f}"))
        left_out |= {(r["layer"], r["format"], name): why for name, why in r["not timed"].items()}
    caption = "The same beside other packages; one whose second step is wrong is not timed."
    if left_out:
        reasons = (
            f"{name} ({layer}, {format}: {why})" for (layer, format, name), why in left_out.items()
        )
        caption += f" Left out: {'; '.join(reasons)}."
    head = ("layer", "format", "tokens", "candidate", "ms", "÷ ours to bf16", "peak GiB")
    return Section("Packed experts in other packages", caption, table(head, rows), found)
