"""Writes docs/features.md from feature_list.py: `make features`."""

from pathlib import Path

from feature_combinations import OF_CALLS, OF_KERNELS
from feature_list import FEATURES, NOTES, Feature, numbered, reasons

DOCUMENT = Path(__file__).parents[2] / "docs" / "features.md"
BEGINNING = """\
# Features

What works with what? Where a row and a column meet:

- ✓: they work together, in both passes
- ✓ and a letter: they do, with a remark
- a number: they do not, for that reason

Without a feature, a call is `sonicmoe.experts` in bf16 with SwiGLU, `gate_up="interleaved"`,
`memory="keep"`, and gradients for everything. Features of one group exclude each other.

"""
REFUSED = """
A pair with a number raises a `ValueError`, unless the list says otherwise:

"""
PROVED = """
## Tests

`tests/features/feature_list.py` declares each feature once; `make features` writes this page.

| test | where | what it runs |
|---|---|---|
| `test_pair` | `tests/features/test_features.py` | every pair; on a CPU, CUDA graphs on a GPU |
| `test_product` | `tests/features/test_features.py` | every combination of the groups {product} |
| `test_every_triple` | `tests/features/test_features.py` | combinations in which any three meet |

Output and gradients are compared with fp64 within the [error budget](numerics.md#the-error-budget).
With recompute, slices, kept FP8 weights, checkpoint, compile and CUDA graph they must have the bits
of the call without these. One exception: fp32 router logits compiled under autocast, whose backward
pass PyTorch runs in bf16. [GPU tests](gpu_tests.md) lists what has been run on a GPU.
"""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text() -> str:
    """The document."""
    return BEGINNING + _matrix() + _features() + REFUSED + _footnotes() + _proved()


def _proved() -> str:
    groups = OF_KERNELS + OF_CALLS
    return PROVED.format(product=", ".join(groups[:-1]) + f" and {groups[-1]}, without fp32")


def _matrix() -> str:
    """The lower triangle; columns have the numbers of rows."""
    columns = FEATURES[:-1]
    lines = [["", *(str(i) for i, _ in enumerate(columns, 1))]]
    for i, feature in enumerate(FEATURES, 1):
        cells = [_cell(feature, other) for other in columns[: i - 1]]
        lines.append([f"{i} {feature.name}", *cells])
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
