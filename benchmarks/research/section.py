"""A section of docs/benchmarks.md."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .results import Record


class Section(NamedTuple):
    """A table with a heading and a one-line caption; `records` are its sources."""

    title: str
    caption: str
    table: str
    records: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        return f"### {self.title}\n\n{self.caption}\n\n{self.table}"


def newest(records: Sequence[Record], kind: str, *keys: str) -> list[Record]:
    """The last record of this kind with each combination of values."""
    found = {tuple(r[key] for key in keys): r for r in records if r.get("kind") == kind}
    return list(found.values())


def form(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
