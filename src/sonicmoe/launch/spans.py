"""How a weight gradient splits the rows of long experts: see `kernels.spans`."""

from functools import cache
from typing import NamedTuple

import torch

from ..kernels.spans import sum_spans_kernel
from ..shapes import ceil_div
from . import memory
from .launcher import Bound

SHORTEST_SPAN = 1024  # least rows of a span


class Spans(NamedTuple):
    """The buffer of partial sums and the rows of a span; no buffer if nothing is split."""

    partial: torch.Tensor | None = None  # (places, M·N)
    rows: int = 0
    places: int = 0


def spans_of(
    rows: int, longest: int, shape, tiles: int, programs: int, device, block_k: int = 64
) -> Spans:
    """Spans of a quarter of the rows that a program gets with balanced routing, in multiples of
    `block_k`; the partial sums take at most four fp32 tiles per program, 69 MB on an H200. None if
    one expert has tiles for all programs, or if two spans are more than `longest`, the most rows
    that an expert can have: that depends on K, not on T, so a new T compiles nothing."""
    if tiles >= programs or rows * tiles > 2 * programs * longest:
        return Spans()
    experts, m, n = shape
    span = max(SHORTEST_SPAN, block_k * ceil_div(rows * tiles, 4 * block_k * programs))
    work = experts * tiles
    if work >= 0.9 * programs * ceil_div(work, programs):
        # Balanced experts keep all programs busy without spans: split only much longer ones.
        span = max(span, block_k * ceil_div(5 * rows, 8 * block_k * experts))
    places = rows // span
    return Spans(memory.empty((max(places, 1), m * n), torch.float32, device), span, places)


@cache
def sum_spans(size: int, add: bool) -> Bound:
    return Bound(sum_spans_kernel, SIZE=size, BLOCK=2048, ADD=add, num_warps=4)
