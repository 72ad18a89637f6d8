"""Up with an adapter: X W1ᵀ + U Bᵀ in one accumulator, which leaves it once, rounded once.

And a transposition, to get at an expert's own factor: PEFT stores them side by side.
"""

import triton
import triton.language as tl

from ..tile_order import tile_of
from .tile import accumulate_lora, halves, pairs, source_rows


@triton.jit
def lora_up_kernel(
    x, row_token, w1, b1, u, b, z, a, tiles,
    w_stride_e, w_stride_n, w_stride_k,
    H: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
    GATED: tl.constexpr, CONCATENATED: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, B_KN: tl.constexpr, PRECISION: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Z = X W1ᵀ + U Bᵀ + b1, A = act(Z). Grid: any number of programs."""
    TWO_HALVES: tl.constexpr = GATED and CONCATENATED
    I: tl.constexpr = N // 2 if GATED else N
    HALF: tl.constexpr = BLOCK_N // 2
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    dtype = a.dtype.element_ty
    total = tl.load(tiles) * n_tiles
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, n_tile = tile_of(tiles, t, H, N, BLOCK_M, BLOCK_N)
        column = n_tile * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        ok = rows < end
        j = tl.arange(0, BLOCK_N)
        if TWO_HALVES:
            first_column = column // 2
            n = first_column + j % HALF
            n_ok = n < I
            n += j // HALF * I
        else:
            first_column = column
            n = column + j
            n_ok = n < N
        acc = accumulate_lora(
            x, source_rows(row_token, rows, ok, row), row,
            w1, expert, first_column, I, w_stride_e, w_stride_n, w_stride_k,
            u, rows, ok, b, n, n_ok,
            H, N, RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, A_TMA, B_TMA, B_KN, TWO_HALVES, PRECISION, UNROLL,
        )  # fmt: skip
        if b1 is not None:
            acc += tl.load(b1 + expert * N + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
        wide_rows = rows.to(tl.int64)[:, None]
        n_ok = ok[:, None] & n_ok[None, :]
        tl.store(z + wide_rows * N + n[None, :], acc.to(dtype), mask=n_ok)
        if GATED:
            if CONCATENATED:
                gate, up = halves(acc, BLOCK_M, BLOCK_N)
            else:
                gate, up = pairs(acc, BLOCK_M, BLOCK_N)
            i = column // 2 + tl.arange(0, HALF)
            i_ok = ok[:, None] & (i < I)[None, :]
            tl.store(a + wide_rows * I + i[None, :], ACTIVATION(gate, up).to(dtype), mask=i_ok)
        else:
            tl.store(a + wide_rows * N + n[None, :], ACTIVATION(acc).to(dtype), mask=n_ok)


@triton.jit
def transpose_kernel(source, out, scale, P, Q, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr):
    """out (Q, P) = scale · sourceᵀ. Grid: (P/BLOCK_P, Q/BLOCK_Q)."""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    q = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = (p < P)[:, None] & (q < Q)[None, :]
    tile = tl.load(source + p.to(tl.int64)[:, None] * Q + q[None, :], mask=inside, other=0.0)
    tile = tl.trans(tile.to(tl.float32) * scale)
    ptr = out + q.to(tl.int64)[:, None] * P + p[None, :]
    tl.store(ptr, tile.to(out.dtype.element_ty), mask=tl.trans(inside))
