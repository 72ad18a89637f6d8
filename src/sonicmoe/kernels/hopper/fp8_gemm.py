"""Grouped GEMM of FP8 rows on Hopper: Y = A Wᵀ for rows sorted by expert.

The main loop is that of `ring`. Rows of A have one scale, or one for each block of 128 columns; all
are powers of two. The accumulator is in units of the scale of the block that it took last: between
two blocks its rows are multiplied by the quotient of their scales, which is exact.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from .epilogue import store_value
from .ring import CONSUMER_M, accumulator_layout, buffers, ceil_div, make_ring, producer

BLOCK_K = gl.constexpr(128)  # columns of A that share a scale


@gluon.jit
def _row_scale(a_scale, block, plane, tile, r):
    """The scale of a block of 128 columns, of each of 64 rows; one past the expert's end."""
    return tile.load(a_scale + block * plane.to(gl.int64), r, 1.0)


@gluon.jit
def _accumulate_blocks(CONSUMER: gl.constexpr, ring, step, a_scale, plane, tile, r):
    """The (64, BLOCK_N) accumulator of this consumer's next tile, the scale of its rows, and the
    ring step after it."""
    BLOCKS: gl.constexpr = ceil_div(ring.K, BLOCK_K)
    acc = ring.zeros()
    scale = _row_scale(a_scale, 0, plane, tile, r)
    for block in range(BLOCKS):
        stage = ring.stages.wait(step)
        acc = ring.multiply(stage, acc, CONSUMER)
        following = _row_scale(a_scale, gl.minimum(block + 1, BLOCKS - 1), plane, tile, r)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        ring.stages.release(stage)
        acc *= (scale / following)[:, None]
        scale = following
        step += 1
    return acc, scale, step


@gluon.jit
def _consumer(
    CONSUMER: gl.constexpr, y, a_scale, plane, w_scale, row_scores, ring, y_smem,
    BLOCK_SCALES: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    L: gl.constexpr = accumulator_layout(ring.BLOCK_N, ring.a.dtype)
    r = gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
    step = 0
    stride = gl.num_programs(0)
    tile = ring.first_tile(CONSUMER)
    for index in range(gl.program_id(0), ring.total, stride):
        entry = ring.load_entry(index + stride)
        if BLOCK_SCALES:
            acc, scale, step = _accumulate_blocks(CONSUMER, ring, step, a_scale, plane, tile, r)
        else:
            scale = _row_scale(a_scale, 0, plane, tile, r)
            acc, step = ring.accumulate(step, CONSUMER)
            acc = ring.finish(acc, step)
        scale *= gl.load(w_scale + tile.expert)
        if row_scores is not None:
            scale *= tile.load(row_scores, r, 0.0)
        acc *= scale[:, None]
        tma.store_wait(0)
        store_value(acc.to(y.dtype), y, tile, tile.n * ring.BLOCK_N, y_smem.index(CONSUMER))
        tile = ring.locate(index + stride, entry, CONSUMER)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["plane"])
def fp8_gemm_kernel(
    a, w, a_scale, plane, w_scale, row_scores, y, tiles,
    K: gl.constexpr, N: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SCALES: gl.constexpr,
):  # fmt: skip
    """Y = A Wᵀ·score for rows sorted by expert; a_scale (⌈K/128⌉ if BLOCK_SCALES else 1, plane).

    Grid: one program per SM; each owns the tiles of Y that it writes.
    """
    ring = make_ring(a.dtype, w, tiles, K, N, 0, BLOCK_N, BLOCK_K, STAGES, "nk", None, False)
    y_smem = buffers(y.dtype, 2, [CONSUMER_M, BLOCK_N])
    gl.warp_specialize(
        [
            (_consumer, (0, y, a_scale, plane, w_scale, row_scores, ring, y_smem, BLOCK_SCALES)),
            (_consumer, (1, y, a_scale, plane, w_scale, row_scores, ring, y_smem, BLOCK_SCALES)),
            (producer, (ring, a, None, w, None, None)),
        ],
        [4, 1],
        [232, 40],
    )
