"""Grouped GEMM of FP8 rows on Hopper: Y = A Wᵀ for rows sorted by expert.

The main loop is that of `ring`. Rows of A have one scale, or one for each block of 128 columns; all
are powers of two. The accumulator is in units of the scale of the block that it took last: between
two blocks its rows are multiplied by the quotient of their scales, which is exact.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .ring import (
    CONSUMER_M,
    accumulate,
    accumulator_layout,
    finish,
    load_work,
    producer,
    rows_of_work,
    stage_and_store,
    weight_ring,
)

BLOCK_K = gl.constexpr(128)  # columns of A that share a scale


@gluon.jit
def _row_scale(a_scale, block, plane, row, end, r):
    """The scale of a block of 128 columns, of each of 64 rows; one past the expert's end."""
    return gl.load(a_scale + block * plane.to(gl.int64) + row + r, mask=row + r < end, other=1.0)


@gluon.jit
def _accumulate_blocks(
    step, a_scale, plane, row, end, r, a_smem, w_smem, full, empty,
    CONSUMER: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The (64, BLOCK_N) accumulator of this consumer's next tile, the scale of its rows, and the
    ring step after it."""
    BLOCKS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    acc = gl.zeros((CONSUMER_M, BLOCK_N), gl.float32, accumulator_layout(BLOCK_N, a_smem.dtype))
    scale = _row_scale(a_scale, 0, plane, row, end, r)
    for block in range(BLOCKS):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        w = w_smem.index(slot).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
        acc = warpgroup_mma(a_smem.index(2 * slot + CONSUMER), w, acc, is_async=True)
        following = _row_scale(a_scale, gl.minimum(block + 1, BLOCKS - 1), plane, row, end, r)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(slot), count=1)
        acc *= gl.expand_dims(scale / following, 1)
        scale = following
        step += 1
    return acc, scale, step


@gluon.jit
def _consumer(
    y, a_scale, plane, w_scale, row_scores, tiles, total, a_smem, w_smem, y_smem, full, empty,
    CONSUMER: gl.constexpr, K: gl.constexpr, N: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SCALES: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    L: gl.constexpr = accumulator_layout(BLOCK_N, a_smem.dtype)
    r = gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
    step = 0
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    expert, start, end, number = load_work(tiles, first, total, N, BLOCK_N)
    row, n = rows_of_work(first, start, end, number, K, N, BLOCK_N)
    row += CONSUMER * CONSUMER_M
    for index in range(first, total, stride):
        later = index + stride
        next_expert, start, next_end, number = load_work(tiles, later, total, N, BLOCK_N)
        if BLOCK_SCALES:
            acc, scale, step = _accumulate_blocks(
                step, a_scale, plane, row, end, r, a_smem, w_smem, full, empty,
                CONSUMER, K, BLOCK_N, STAGES,
            )  # fmt: skip
        else:
            scale = _row_scale(a_scale, 0, plane, row, end, r)
            acc, step = accumulate(
                step, a_smem, w_smem, full, empty, CONSUMER,
                K, 0, BLOCK_N, BLOCK_K, STAGES, "nk", False,
            )  # fmt: skip
            acc = finish(acc, step, empty, STAGES)
        scale *= gl.load(w_scale + expert)
        if row_scores is not None:
            scale *= gl.load(row_scores + row + r, mask=row + r < end, other=0.0)
        acc *= gl.expand_dims(scale, 1)
        tma.store_wait(0)
        stage_and_store(acc.to(y.dtype), y, end, row, n * BLOCK_N, y_smem.index(CONSUMER), BLOCK_N)
        expert, end = next_expert, next_end
        row, n = rows_of_work(later, start, next_end, number, K, N, BLOCK_N)
        row += CONSUMER * CONSUMER_M
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
    a_smem = gl.allocate_shared_memory(
        a.dtype,
        [2 * STAGES, CONSUMER_M, BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_M, BLOCK_K], a.dtype),
    )
    w_smem = weight_ring(w, BLOCK_N, BLOCK_K, STAGES, "nk", None)
    y_smem = gl.allocate_shared_memory(
        y.dtype,
        [2, CONSUMER_M, BLOCK_N],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_M, BLOCK_N], y.dtype),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    total = gl.load(tiles) * ((N + BLOCK_N - 1) // BLOCK_N)
    gl.warp_specialize(
        [
            (_consumer, (
                y, a_scale, plane, w_scale, row_scores, tiles, total,
                a_smem, w_smem, y_smem, full, empty,
                0, K, N, BLOCK_N, STAGES, BLOCK_SCALES,
            )),
            (_consumer, (
                y, a_scale, plane, w_scale, row_scores, tiles, total,
                a_smem, w_smem, y_smem, full, empty,
                1, K, N, BLOCK_N, STAGES, BLOCK_SCALES,
            )),
            (producer, (
                a, None, w, None, None, tiles, total, a_smem, w_smem, full, empty,
                K, N, 0, BLOCK_N, BLOCK_K, STAGES, "nk", None, False,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
