"""The order in which programs walk over the tiles of a GEMM; the spans of long sums."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl
from devices import on

from sonicmoe import ops
from sonicmoe.kernels import spans
from sonicmoe.kernels.tile_order import BAND, in_bands, tile_of

pytestmark = on("interpreter")


@triton.jit
def _bands_kernel(
    out, m_tiles, n_tiles: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    for index in range(m_tiles * n_tiles):
        m, n = in_bands(index, m_tiles, n_tiles, BLOCK_M, BLOCK_N)
        tl.store(out + 2 * index, m)
        tl.store(out + 2 * index + 1, n)


def _walk(m_tiles, n_tiles, bm, bn):
    out = torch.full((m_tiles * n_tiles, 2), -1, dtype=torch.int32)
    _bands_kernel[(1,)](out, m_tiles, n_tiles, bm, bn)
    return [tuple(tile) for tile in out.tolist()]


@pytest.mark.parametrize("bm", [32, 128, 256, 4096])
@pytest.mark.parametrize(("m_tiles", "n_tiles"), [(1, 1), (7, 3), (9, 40), (23, 17), (40, 9)])
def test_every_tile_once(m_tiles, n_tiles, bm):
    tiles = _walk(m_tiles, n_tiles, bm, 256)
    assert sorted(tiles) == list(itertools.product(range(m_tiles), range(n_tiles)))


def test_wide_matrices_in_bands_down_the_columns():
    high, wide = BAND.value // 512, BAND.value // 256 + 1
    tiles = _walk(2 * high + 1, wide, 512, 256)  # the second band has what is left
    first = [(m, n) for n in range(wide) for m in range(high)]
    second = [(m, n) for n in range(wide) for m in range(high, 2 * high + 1)]
    assert tiles == first + second
    assert _walk(high + 1, wide, 512, 256) == [(m, n) for n in range(wide) for m in range(high + 1)]


def test_narrow_matrices_along_the_shorter_side():
    assert _walk(3, 2, 128, 128) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert _walk(2, 3, 128, 128) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


@triton.jit
def _tiles_kernel(
    tiles, out, K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    for index in range(tl.load(tiles) * (N // BLOCK_N)):
        expert, row, end, n = tile_of(tiles, index, K, N, BLOCK_M, BLOCK_N)
        tl.store(out + 4 * index, expert)
        tl.store(out + 4 * index + 1, row)
        tl.store(out + 4 * index + 2, end)
        tl.store(out + 4 * index + 3, n)


@pytest.mark.parametrize("n_tiles", [1, 2, 20])
@pytest.mark.parametrize("depth", [8, 1 << 10, 1 << 20], ids=["light", "small", "large"])
def test_experts_one_after_the_other(depth, n_tiles):
    start = torch.tensor([0, 1, 1, 5000, 5128, 6100], dtype=torch.int32)
    _, tiles = ops.tiles(start, 6100, 128, "triton")
    out = torch.full((int(tiles[0, 0]) * n_tiles, 4), -1, dtype=torch.int32)
    _tiles_kernel[(1,)](tiles, out, depth, n_tiles * 256, 128, 256)
    found = [tuple(work) for work in out.tolist()]
    want = [
        (e, row, int(start[e + 1]), n)
        for e in range(5)
        for row in range(int(start[e]), int(start[e + 1]), 128)
        for n in range(n_tiles)
    ]
    assert sorted(found) == want
    for expert, rows in ((2, 4999), (4, 972)):
        by_row = [w for w in found if w[0] == expert] == [w for w in want if w[0] == expert]
        short = depth == 1 << 10 and rows <= 1024 and n_tiles > 1
        wide = depth == 1 << 20 and n_tiles == 20
        assert by_row != (short or wide)  # column by column, in bands
    assert [work[0] for work in found] == sorted(work[0] for work in found)


# --- spans ----------------------------------------------------------------------------------------
@triton.jit
def _groups_kernel(expert_start, num_experts, span, groups, out):
    for group in range(groups):
        here = group < num_experts
        start = tl.load(expert_start + group, mask=here, other=0)
        end = tl.load(expert_start + group + 1, mask=here, other=0)
        expert, start, end = spans.rows_of(group, start, end, expert_start, num_experts, span)
        tl.store(out + 3 * group, expert)
        tl.store(out + 3 * group + 1, start)
        tl.store(out + 3 * group + 2, end)


@pytest.mark.parametrize("seed", range(60))
def test_every_row_is_summed_once_and_no_span_is_long(seed):
    draw = random.Random(seed)
    span = draw.choice([1, 2, 3, 8])
    counts = [draw.choice([0, 1, 5, draw.randrange(40)]) for _ in range(draw.randint(1, 9))]
    starts = [0, *itertools.accumulate(counts)]
    places = (starts[-1] + draw.choice([0, 7])) // span
    groups = len(counts) + places
    out = torch.empty(groups, 3, dtype=torch.int32)
    _groups_kernel[(1,)](torch.tensor(starts, dtype=torch.int32), len(counts), span, groups, out)
    summed = []
    for group, (expert, start, end) in enumerate(out.tolist()):
        if start < 0:
            continue
        assert starts[expert] <= start and end <= starts[expert + 1]
        if group < len(counts):
            assert (start, end) == (starts[group], starts[group + 1])
        assert end - start < 2 * span
        summed += range(start, end)
    assert sorted(summed) == list(range(starts[-1]))
