"""Grouped GEMM on Hopper: Y = A Wᵀ for rows sorted by expert. The main loop is in `ring`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .ring import CONSUMER_M, next_tile, producer, stage_and_store, weight_ring


@gluon.jit
def _consumer(
    y, bias, row_scores, tiles, total, a_smem, w_smem, y_smem, full, empty,
    CONSUMER: gl.constexpr, K: gl.constexpr, N: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    step = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        acc, step, expert, end, row, n = next_tile(
            step, index, tiles, total, a_smem, w_smem, full, empty,
            CONSUMER, K, N, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, False,
        )  # fmt: skip
        if bias is not None:
            c = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, L))
            acc += gl.expand_dims(
                gl.load(bias + expert * N + c, mask=c < N, other=0.0).to(gl.float32), 0
            )
        if row_scores is not None:
            r = row + gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
            acc *= gl.expand_dims(gl.load(row_scores + r, mask=r < end, other=0.0), 1)
        tma.store_wait(0)
        stage_and_store(acc.to(y.dtype), y, end, row, n * BLOCK_N, y_smem.index(CONSUMER), BLOCK_N)
    tma.store_wait(0)


@gluon.jit
def hopper_gemm_kernel(
    a, w, lora_u, lora_b, bias, row_scores, y, tiles,
    K: gl.constexpr, N: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Y = (A Wᵀ + bias)·score, with LoRA (A Wᵀ + U Bᵀ + bias)·score, for rows sorted by expert.

    Grid: one program per SM; each owns the tiles of Y that it writes.
    """
    a_smem = gl.allocate_shared_memory(
        y.dtype,
        [2 * STAGES, CONSUMER_M, BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_M, BLOCK_K], y.dtype),
    )
    w_smem = weight_ring(w, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, None)
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
                y, bias, row_scores, tiles, total, a_smem, w_smem, y_smem, full, empty,
                0, K, N, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT,
            )),
            (_consumer, (
                y, bias, row_scores, tiles, total, a_smem, w_smem, y_smem, full, empty,
                1, K, N, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT,
            )),
            (producer, (
                a, None, w, lora_u, lora_b, tiles, total, a_smem, w_smem, full, empty,
                K, N, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, None, False,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
