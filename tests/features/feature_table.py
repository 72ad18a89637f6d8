"""Writes docs/features.md from feature_list.py: `make features`."""

from pathlib import Path

from feature_list import FEATURES, NOTES, Feature, numbered, reasons

DOCUMENT = Path(__file__).parents[2] / "docs" / "features.md"
BEGINNING = """\
# Features

What works with what? Where a row and a column meet, ✓ means that the two work together in both passes, a number why
they do not, and ✓ with a letter that they do, with a remark. Without a feature, a call is `sonicmoe.experts` in bf16
with SwiGLU, `gate_up="interleaved"`, `memory="keep"`, and gradients for everything.

"""
REFUSED = """
A pair with a number raises a `ValueError`, unless the list says otherwise:

"""
PROVED = """
## Tests

`make features` writes this page from `tests/features/feature_list.py`, where each feature is declared once.

| test | what it runs |
|---|---|
| `test_pair` in `tests/features/test_features.py` | every pair, without a GPU |
| `test_product` in `tests/gpu/test_gpu_features.py` | on a GPU, every combination of the features from fp8 to PEFT, \
except for kept FP8 weights |
| `test_every_triple` in `tests/gpu/test_gpu_features.py` | on a GPU, combinations in which every three features meet |

Each compares the output and every gradient with fp64, within the [error budget](numerics.md#the-error-budget). With
recompute, slices, checkpoint, compile, CUDA graph and kept FP8 weights the bits must also be those of a call without
them.
"""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text() -> str:
    """The document."""
    return BEGINNING + _matrix() + _features() + REFUSED + _footnotes() + PROVED


def _matrix() -> str:
    """The lower triangle; columns have the numbers of rows."""
    columns = FEATURES[:-1]
    lines = [["", *(str(i) for i, _ in enumerate(columns, 1))]]
    for i, feature in enumerate(FEATURES, 1):
        lines.append([f"{i} {feature.name}", *(_cell(feature, other) for other in columns[: i - 1])])
    return _table(lines, len(columns) + 1)


def _cell(one: Feature, other: Feature) -> str:
    if one.group == other.group:
        return ""
    found = reasons((one, other))
    if found:
        return ", ".join(str(numbered().index(reason) + 1) for reason in found)
    note = NOTES.get(frozenset({one.name, other.name}))
    return "✓" if note is None else f"✓{LETTERS[_notes().index(note)]}"


def _notes() -> list[str]:
    return list(dict.fromkeys(NOTES.values()))


def _footnotes() -> str:
    lines = [f"{i}. {reason}" for i, reason in enumerate(numbered(), 1)]
    lines += ["", *(f"- {LETTERS[i]}: {note}" for i, note in enumerate(_notes()))]
    return "\n".join(lines) + "\n"


def _features() -> str:
    lines = [["feature", "group", "what it is"]]
    lines += [[f.name, f.group if f.group != f.name else "", f.words] for f in FEATURES]
    return "\n" + _table(lines, 3)


def _table(lines: list[list[str]], columns: int) -> str:
    rows = ["| " + " | ".join(line + [""] * (columns - len(line))) + " |" for line in lines]
    rows.insert(1, "|" + "---|" * columns)
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(text())
