"""Grouped GEMM on Hopper: Y = A Wᵀ for rows sorted by expert. The main loop is in `ring`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .epilogue import biased, store_value
from .ring import CONSUMER_M, accumulator_layout, buffers, make_ring, producer


@gluon.jit
def _consumer(CONSUMER: gl.constexpr, ring, y, bias, row_scores, y_smem):
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    L: gl.constexpr = accumulator_layout(ring.BLOCK_N, y.dtype)
    step = 0
    for index in range(gl.program_id(0), ring.total, gl.num_programs(0)):
        acc, step, tile = ring.next_tile(step, index, CONSUMER)
        column = tile.n * ring.BLOCK_N
        if bias is not None:
            acc = biased(acc, bias + tile.expert * ring.N, column, ring.N)
        if row_scores is not None:
            r = gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
            acc *= tile.load(row_scores, r, 0.0)[:, None]
        tma.store_wait(0)
        store_value(acc.to(y.dtype), y, tile, column, y_smem.index(CONSUMER))
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
    ring = make_ring(
        y.dtype, w, tiles, K, N, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, None, False
    )
    y_smem = buffers(y.dtype, 2, [CONSUMER_M, BLOCK_N])
    gl.warp_specialize(
        [
            (_consumer, (0, ring, y, bias, row_scores, y_smem)),
            (_consumer, (1, ring, y, bias, row_scores, y_smem)),
            (producer, (ring, a, None, w, lora_u, lora_b)),
        ],
        [4, 1],
        [232, 40],
    )
