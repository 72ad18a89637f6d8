"""Tables as text: aligned for a terminal, and valid Markdown."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The first column is left-aligned, the others right-aligned. None becomes a dash."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        first, *rest = zip(row, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]
        return "| " + " | ".join(padded) + " |"

    first, *rest = widths
    rule = "|-" + "-" * first + "-|" + "".join("-" * (w + 1) + ":|" for w in rest)
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
