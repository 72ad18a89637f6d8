"""Tables that make every candidate of `sonicmoe tune` the selected configuration once."""

from itertools import zip_longest

from sonicmoe.shapes import Problem
from sonicmoe.tuning import Target
from sonicmoe.tuning.candidates import candidates
from sonicmoe.tuning.table import Key, RowKey, Table, WeightKey


def keys(p: Problem, itemsize: int, transposed: bool = False) -> list[Key]:
    """What the six GEMMs of a layer are looked up by."""
    gradients = [
        WeightKey(itemsize, p.H, p.I, True, False),
        WeightKey(itemsize, p.N, p.H, False, True),
    ]
    if transposed:  # weights that lie in memory the other way round: so does the whole GEMM
        gradients = [WeightKey(size, n, m, right, left) for size, m, n, left, right in gradients]
    return [
        RowKey("up", itemsize, p.H, p.N, p.gated),
        RowKey("down", itemsize, p.I, p.H, True),
        RowKey("dz", itemsize, p.H, p.I, p.gated),
        RowKey("dx", itemsize, p.N, p.H, True),
        *gradients,
    ]


def candidate_tables(
    p: Problem,
    itemsize: int,
    target: Target,
    transposed: bool = False,
    only=lambda: lambda config: True,
) -> list[Table]:
    """The i-th table holds the i-th candidate of every GEMM, as long as there is one.

    `only()` makes the filter for one GEMM.
    """
    columns = []
    for key in keys(p, itemsize, transposed):
        wanted = only()
        columns.append([(key, c) for c in candidates(key, target) if wanted(c)])
    return [Table.of(pair for pair in row if pair) for row in zip_longest(*columns)]
