"""Tables as text: aligned for a terminal, and valid Markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The first column to the left, the others to the right."""
    cells = [list(header), *([str(c) for c in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        first, *rest = zip(row, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]
        return "| " + " | ".join(padded) + " |"

    first, *rest = widths
    rule = "|-" + "-" * first + "-|" + "".join("-" * (w + 1) + ":|" for w in rest)
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])
