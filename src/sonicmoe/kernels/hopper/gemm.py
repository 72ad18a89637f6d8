"""Grouped GEMM on Hopper: Y = A Wᵀ for rows sorted by expert. The main loop is in `ring`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .consumer import run
from .epilogue import biased, store_value
from .gluon_compat import aggregate
from .ring import CONSUMER_M, accumulator_layout, buffers, make_ring

PRODUCER_REGISTERS = gl.constexpr(40)


@aggregate
class Epilogue:
    """Y = (acc + bias)·score."""

    y: tma.tensor_descriptor
    bias: gl.tensor | gl.constexpr  # may be None
    row_scores: gl.tensor | gl.constexpr  # may be None
    smem: gl.shared_memory_descriptor  # a buffer for each consumer
    N: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def apply(self, acc, tile):
        acc = acc.wait()
        column = tile.n * acc.shape[1]
        if self.bias is not None:
            acc = biased(acc, self.bias + tile.expert * self.N, column, self.N)
        if self.row_scores is not None:
            acc *= tile.load(self.row_scores, 0.0)[:, None]
        tma.store_wait(0)
        store_value(acc.to(self.y.dtype), self.y, tile, column, self.smem.index(tile.CONSUMER))


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
    smem = buffers(y.dtype, 2, [CONSUMER_M, BLOCK_N])
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N, y.dtype))
    epilogue = Epilogue(y=y, bias=bias, row_scores=row_scores, smem=smem, N=N, ROWS=ROWS)
    run(ring, epilogue, a, None, w, lora_u, lora_b, PRODUCER_REGISTERS)
