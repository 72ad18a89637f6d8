"""Grouped GEMM of FP8 rows on Hopper: Y = A Wᵀ + bias for rows sorted by expert.

The main loop is that of `ring`. Rows of A have one scale, or one for each block of 128 columns; all
are powers of two. The accumulator is in units of the scale of the block that it took last: between
two blocks its rows are multiplied by the quotient of their scales, which is exact.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from .epilogue import biased, store_value
from .gluon_compat import aggregate
from .ring import CONSUMER_M, accumulator_layout, buffers, ceil_div, make_ring, producer

BLOCK_K = gl.constexpr(128)  # columns of A that share a scale


@aggregate
class Epilogue:
    """What a consumer reads and writes beside the ring buffer."""

    y: tma.tensor_descriptor
    y_smem: gl.shared_memory_descriptor
    a_scale: gl.tensor
    plane: gl.tensor
    w_scale: gl.tensor
    bias: gl.tensor | gl.constexpr  # may be None
    row_scores: gl.tensor | gl.constexpr  # may be None
    BLOCK_SCALES: gl.constexpr


@gluon.jit
def _row_scale(e, block, tile, r):
    """The scale of a block of 128 columns, of each of 64 rows; one past the expert's end."""
    return tile.load(e.a_scale + block * e.plane.to(gl.int64), r, 1.0)


@gluon.jit
def _accumulate_blocks(CONSUMER: gl.constexpr, e, ring, step, tile, r):
    """The (64, BLOCK_N) accumulator of this consumer's next tile, the scale of its rows, and the
    ring step after it."""
    BLOCKS: gl.constexpr = ceil_div(ring.K, BLOCK_K)
    acc = ring.zeros()
    scale = _row_scale(e, 0, tile, r)
    for block in range(BLOCKS):
        stage = ring.stages.wait(step)
        acc = ring.multiply(stage, acc, CONSUMER)
        following = _row_scale(e, gl.minimum(block + 1, BLOCKS - 1), tile, r)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        ring.stages.release(stage)
        acc *= (scale / following)[:, None]
        scale = following
        step += 1
    return acc, scale, step


@gluon.jit
def _consumer(CONSUMER: gl.constexpr, e, ring):
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    L: gl.constexpr = accumulator_layout(ring.BLOCK_N, ring.a.dtype)
    r = gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
    step = 0
    stride = gl.num_programs(0)
    tile = ring.first_tile(CONSUMER)
    for index in range(gl.program_id(0), ring.total, stride):
        entry = ring.load_entry(index + stride)
        if e.BLOCK_SCALES:
            acc, scale, step = _accumulate_blocks(CONSUMER, e, ring, step, tile, r)
        else:
            scale = _row_scale(e, 0, tile, r)
            acc, step = ring.accumulate(step, CONSUMER)
            acc = ring.finish(acc, step)
        scale *= gl.load(e.w_scale + tile.expert)
        if e.bias is not None or ring.RANK:
            acc *= scale[:, None]
            if ring.RANK:  # before the bias: afterwards 40 registers spill
                acc, step = ring.add_low_rank(acc, step, CONSUMER)
            if e.bias is not None:
                acc = biased(acc, e.bias + tile.expert * ring.N, tile.n * ring.BLOCK_N, ring.N)
            scale = gl.full_like(scale, 1.0)
        if e.row_scores is not None:
            scale *= tile.load(e.row_scores, r, 0.0)
        acc *= scale[:, None]
        tma.store_wait(0)
        column = tile.n * ring.BLOCK_N
        store_value(acc.to(e.y.dtype), e.y, tile, column, e.y_smem.index(CONSUMER))
        tile = ring.locate(index + stride, entry, CONSUMER)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["plane"])
def fp8_gemm_kernel(
    a, w, lora_u, lora_b, a_scale, plane, w_scale, bias, row_scores, y, tiles,
    K: gl.constexpr, N: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SCALES: gl.constexpr,
):  # fmt: skip
    """Y = (A Wᵀ + bias)·score, with LoRA (A Wᵀ + U Bᵀ + bias)·score, for rows sorted by expert.

    a_scale is (⌈K/128⌉ if BLOCK_SCALES else 1, plane).

    Grid: one program per SM; each owns the tiles of Y that it writes.
    """
    ring = make_ring(a.dtype, w, tiles, K, N, RANK, BLOCK_N, BLOCK_K, STAGES, "nk", None, False)
    y_smem = buffers(y.dtype, 2, [CONSUMER_M, BLOCK_N])
    epilogue = Epilogue(y, y_smem, a_scale, plane, w_scale, bias, row_scores, BLOCK_SCALES)
    gl.warp_specialize(
        [
            (_consumer, (0, epilogue, ring)),
            (_consumer, (1, epilogue, ring)),
            (producer, (ring, a, None, w, lora_u, lora_b)),
        ],
        [4, 1],
        [232, 40],
    )
