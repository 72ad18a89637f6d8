"""Grouped GEMM of FP8 rows on Hopper: Y = A Wᵀ + bias for rows sorted by expert.

Rows of A have one scale, or one for each block of 128 columns; all are powers of two. The
accumulator is in units of the scale of the last block: see `consumer`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .consumer import run
from .epilogue import biased, store_value
from .gluon_compat import aggregate
from .ring import CONSUMER_M, accumulator_layout, buffers, make_ring

BLOCK_K = gl.constexpr(128)  # columns of A that share a scale
PRODUCER_REGISTERS = gl.constexpr(40)


@aggregate
class Epilogue:
    """Y = (acc·scale + bias)·score, with LoRA (acc·scale + U Bᵀ + bias)·score."""

    y: tma.tensor_descriptor
    a_scale: gl.tensor
    plane: gl.tensor
    w_scale: gl.tensor
    bias: gl.tensor | gl.constexpr  # may be None
    row_scores: gl.tensor | gl.constexpr  # may be None
    smem: gl.shared_memory_descriptor  # a buffer for each consumer
    N: gl.constexpr
    RANK: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def row_scale(self, tile, block):
        """The scale of a block of 128 columns, of each of 64 rows; one past the expert's end."""
        return tile.load(self.a_scale + block * self.plane.to(gl.int64), 1.0)

    @gluon.jit
    def look_up(self, tile):
        return ()

    @gluon.jit
    def before(self, tile):
        return (self.row_scale(tile, 0),)

    @gluon.jit
    def apply(self, acc, tile, scale):
        values = acc.wait()
        column = tile.n * values.shape[1]
        scale *= gl.load(self.w_scale + tile.expert)
        if self.bias is not None or self.RANK:
            values *= scale[:, None]
            if self.RANK:  # before the bias: afterwards 40 registers spill
                values = acc.add_low_rank(values)
            if self.bias is not None:
                values = biased(values, self.bias + tile.expert * self.N, column, self.N)
            scale = gl.full_like(scale, 1.0)
        if self.row_scores is not None:
            scale *= tile.load(self.row_scores, 0.0)
        values *= scale[:, None]
        tma.store_wait(0)
        store_value(values.to(self.y.dtype), self.y, tile, column, self.smem.index(tile.CONSUMER))


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
    ring = make_ring(
        a.dtype, w, tiles, K, N, RANK, BLOCK_N, BLOCK_K, STAGES, "nk", None, False, BLOCK_SCALES
    )
    smem = buffers(y.dtype, 2, [CONSUMER_M, BLOCK_N])
    epilogue = Epilogue(
        y=y, a_scale=a_scale, plane=plane, w_scale=w_scale, bias=bias, row_scores=row_scores,
        smem=smem, N=N, RANK=RANK,
        ROWS=gl.SliceLayout(1, accumulator_layout(BLOCK_N, a.dtype)),
    )  # fmt: skip
    run(ring, epilogue, a, None, w, lora_u, lora_b, PRODUCER_REGISTERS)
