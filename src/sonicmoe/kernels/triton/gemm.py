"""Row products: one output row for each routed row. Up, down, and the product with the transpose.

Every kernel is persistent: programs walk over (M-tile, N-tile) pairs in the order of
`tile.place_of`. A program owns the tile it writes.
"""

import triton
import triton.language as tl

from ..tile_order import tile_of
from .tile import accumulate, accumulate_lora, halves, pairs, source_rows


@triton.jit
def up_kernel(
    x, row_token, w1, b1, z, a, tiles,
    w_stride_e, w_stride_n, w_stride_k,
    H: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr, CONCATENATED: tl.constexpr,
    ACTIVATION: tl.constexpr, KEEP_Z: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, B_KN: tl.constexpr, PRECISION: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Z = X W1ᵀ + b1, A = act(Z). Grid: any number of programs."""
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
        first_column = column // 2 if TWO_HALVES else column
        acc = accumulate(
            x, source_rows(row_token, rows, ok, row), row,
            w1, expert, first_column, I, w_stride_e, w_stride_n, w_stride_k,
            H, N, BLOCK_M, BLOCK_N, BLOCK_K, A_TMA, B_TMA, B_KN, TWO_HALVES, PRECISION, UNROLL,
        )  # fmt: skip
        z_rows = z + rows.to(tl.int64)[:, None] * N
        a_rows = a + rows.to(tl.int64)[:, None] * I
        if GATED:
            i = column // 2 + tl.arange(0, HALF)
            i_ok = ok[:, None] & (i < I)[None, :]
            if CONCATENATED:
                gate, up = halves(acc, BLOCK_M, BLOCK_N)
                if b1 is not None:
                    gate += tl.load(b1 + expert * N + i, mask=i < I, other=0.0).to(tl.float32)[
                        None, :
                    ]
                    up += tl.load(b1 + expert * N + I + i, mask=i < I, other=0.0).to(tl.float32)[
                        None, :
                    ]
                if KEEP_Z:
                    tl.store(z_rows + i[None, :], gate.to(dtype), mask=i_ok)
                    tl.store(z_rows + I + i[None, :], up.to(dtype), mask=i_ok)
            else:
                n = column + tl.arange(0, BLOCK_N)
                if b1 is not None:
                    acc += tl.load(b1 + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[
                        None, :
                    ]
                if KEEP_Z:
                    tl.store(
                        z_rows + n[None, :], acc.to(dtype), mask=ok[:, None] & (n < N)[None, :]
                    )
                gate, up = pairs(acc, BLOCK_M, BLOCK_N)
            tl.store(a_rows + i[None, :], ACTIVATION(gate, up).to(dtype), mask=i_ok)
        else:
            n = column + tl.arange(0, BLOCK_N)
            n_ok = ok[:, None] & (n < N)[None, :]
            if b1 is not None:
                acc += tl.load(b1 + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            if KEEP_Z:
                tl.store(z_rows + n[None, :], acc.to(dtype), mask=n_ok)
            tl.store(a_rows + n[None, :], ACTIVATION(acc).to(dtype), mask=n_ok)


@triton.jit
def gemm_kernel(
    a, w, bias, row_scores, u, b, y, tiles,
    w_stride_e, w_stride_n, w_stride_k,
    K: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, B_KN: tl.constexpr, PRECISION: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Y = (A Wᵀ + bias)·score, rows already sorted by expert. Grid: any number of programs.

    With an adapter, u and b, A Wᵀ + U Bᵀ in its place.
    """
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    total = tl.load(tiles) * n_tiles
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, n_tile = tile_of(tiles, t, K, N, BLOCK_M, BLOCK_N)
        column = n_tile * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        ok = rows < end
        n = column + tl.arange(0, BLOCK_N)
        acc = accumulate_lora(
            a, source_rows(None, rows, ok, row), row,
            w, expert, column, 0, w_stride_e, w_stride_n, w_stride_k,
            u, rows, ok, b, n, n < N,
            K, N, RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, A_TMA, B_TMA, B_KN, False, PRECISION, UNROLL,
        )  # fmt: skip
        if bias is not None:
            acc += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if row_scores is not None:
            acc *= tl.load(row_scores + rows, mask=ok, other=0.0)[:, None]
        out = y + rows.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, acc.to(y.dtype.element_ty), mask=ok[:, None] & (n < N)[None, :])
