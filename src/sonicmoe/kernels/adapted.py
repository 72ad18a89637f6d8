"""Products with an adapter: A Wᵀ + U Bᵀ in one accumulator, U (R, r) and B (E, N, r) of low rank.

The kernels of `rows` and `score_gradient` with a second, short product; the sum leaves the
accumulator once, rounded once.
"""

import triton
import triton.language as tl

from .score_gradient import _slice_epilogue
from .tile import accumulate, halves, pairs, source_rows, tile_of


@triton.jit
def _low_rank_blocks(
    u, rows, b, expert, n, first,
    N: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Columns first.. of rows of U and of B, zeros past the last; the rows have to exist."""
    k = first + tl.arange(0, BR)
    u_ptr = u + rows.to(tl.int64)[:, None] * RANK + k[None, :]
    b_ptr = b + (expert.to(tl.int64) * N + n)[None, :] * RANK + k[:, None]
    left = tl.load(u_ptr, mask=(k < RANK)[None, :], other=0.0)
    right = tl.load(b_ptr, mask=(k < RANK)[:, None], other=0.0)
    return left, right


@triton.jit
def _accumulate_both(
    a, a_rows, row, w, expert, column, column_stride, w_stride_e, w_stride_n, w_stride_k,
    u, rows, ok, b, n, n_ok,
    K: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, B_KN: tl.constexpr, TWO_HALVES: tl.constexpr,
    PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`tile.accumulate` and, on top, U Bᵀ.

    The first blocks of U and B are on their way while the loop turns. Masks come after it, since
    the compiler waits for a block at its first use, and stages an untouched one at once.
    """
    rows = tl.where(ok, rows, row)
    n = tl.where(n_ok, n, 0)
    left, right = _low_rank_blocks(u, rows, b, expert, n, 0, N, RANK, BR)
    acc = accumulate(
        a, a_rows, row, w, expert, column, column_stride, w_stride_e, w_stride_n, w_stride_k,
        K, N, BM, BN, BK, A_TMA, B_TMA, B_KN, TWO_HALVES, PRECISION, UNROLL,
    )  # fmt: skip
    left = tl.where(ok[:, None], left, 0.0)
    right = tl.where(n_ok[None, :], right, 0.0)
    acc = tl.dot(left, right, acc, input_precision=PRECISION)
    for first in tl.static_range(BR, RANK, BR):
        left, right = _low_rank_blocks(u, rows, b, expert, n, first, N, RANK, BR)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def adapted_up_kernel(
    x, row_token, w1, b1, u, b, z, a, tiles,
    w_stride_e, w_stride_n, w_stride_k,
    H: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
    GATED: tl.constexpr, CONCATENATED: tl.constexpr, ACTIVATION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, B_KN: tl.constexpr, PRECISION: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Z = X W1ᵀ + U Bᵀ + b1, A = act(Z). Grid: any number of programs."""
    TWO_HALVES: tl.constexpr = GATED and CONCATENATED
    I: tl.constexpr = N // 2 if GATED else N
    HALF: tl.constexpr = BN // 2
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    dtype = a.dtype.element_ty
    total = tl.load(tiles) * n_tiles
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end = tile_of(tiles, t // n_tiles)
        column = (t % n_tiles) * BN
        rows = row + tl.arange(0, BM)
        ok = rows < end
        j = tl.arange(0, BN)
        if TWO_HALVES:
            first_column = column // 2
            n = first_column + j % HALF
            n_ok = n < I
            n += j // HALF * I
        else:
            first_column = column
            n = column + j
            n_ok = n < N
        acc = _accumulate_both(
            x, source_rows(row_token, rows, ok, row), row,
            w1, expert, first_column, I, w_stride_e, w_stride_n, w_stride_k,
            u, rows, ok, b, n, n_ok,
            H, N, RANK, BM, BN, BK, BR, A_TMA, B_TMA, B_KN, TWO_HALVES, PRECISION, UNROLL,
        )  # fmt: skip
        if b1 is not None:
            acc += tl.load(b1 + expert * N + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
        wide_rows = rows.to(tl.int64)[:, None]
        n_ok = ok[:, None] & n_ok[None, :]
        tl.store(z + wide_rows * N + n[None, :], acc.to(dtype), mask=n_ok)
        if GATED:
            if CONCATENATED:
                gate, up = halves(acc, BM, BN)
            else:
                gate, up = pairs(acc, BM, BN)
            i = column // 2 + tl.arange(0, HALF)
            i_ok = ok[:, None] & (i < I)[None, :]
            tl.store(a + wide_rows * I + i[None, :], ACTIVATION(gate, up).to(dtype), mask=i_ok)
        else:
            tl.store(a + wide_rows * N + n[None, :], ACTIVATION(acc).to(dtype), mask=n_ok)


@triton.jit
def adapted_product_kernel(
    a, w, bias, u, b, y, tiles,
    w_stride_e, w_stride_n, w_stride_k,
    K: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, B_KN: tl.constexpr, PRECISION: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Y = A Wᵀ + U Bᵀ + bias, rows already sorted by expert. Grid: any number of programs."""
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    total = tl.load(tiles) * n_tiles
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end = tile_of(tiles, t // n_tiles)
        column = (t % n_tiles) * BN
        rows = row + tl.arange(0, BM)
        ok = rows < end
        n = column + tl.arange(0, BN)
        acc = _accumulate_both(
            a, source_rows(None, rows, ok, row), row,
            w, expert, column, 0, w_stride_e, w_stride_n, w_stride_k,
            u, rows, ok, b, n, n < N,
            K, N, RANK, BM, BN, BK, BR, A_TMA, B_TMA, B_KN, False, PRECISION, UNROLL,
        )  # fmt: skip
        if bias is not None:
            acc += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        out = y + rows.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, acc.to(y.dtype.element_ty), mask=ok[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["plane"])
def adapted_score_gradient_kernel(
    dout, row_token, w2, u, b, scores, row_slot, z, dz, a, partial, tiles, plane,
    w_stride_e, w_stride_n, w_stride_k,
    H: tl.constexpr, I: tl.constexpr, RANK: tl.constexpr,
    GATED: tl.constexpr, CONCATENATED: tl.constexpr, BACKWARD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    SLICES: tl.constexpr, A_TMA: tl.constexpr, B_TMA: tl.constexpr, B_KN: tl.constexpr,
    PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dZ, A' and partial as `score_gradient_kernel` writes them, from dA' = dO W2 + U Bᵀ."""
    n_tiles: tl.constexpr = (I + BN - 1) // BN
    W: tl.constexpr = BN // SLICES
    total = tl.load(tiles) * n_tiles
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end = tile_of(tiles, t // n_tiles)
        n_tile = t % n_tiles
        column = n_tile * BN
        rows = row + tl.arange(0, BM)
        ok = rows < end
        i = column + tl.arange(0, BN)
        acc = _accumulate_both(
            dout, source_rows(row_token, rows, ok, row), row,
            w2, expert, column, 0, w_stride_e, w_stride_n, w_stride_k,
            u, rows, ok, b, i, i < I,
            H, I, RANK, BM, BN, BK, BR, A_TMA, B_TMA, B_KN, False, PRECISION, UNROLL,
        )  # fmt: skip
        slot = tl.load(row_slot + rows, mask=ok, other=0)
        score = tl.load(scores + slot, mask=ok, other=0.0)
        left, right = halves(acc, BM, BN)
        if SLICES == 2:
            parts = (left, right)
        else:
            q0, q1 = halves(left, BM, BN // 2)
            q2, q3 = halves(right, BM, BN // 2)
            parts = (q0, q1, q2, q3)
        ds = tl.zeros((BM,), tl.float32)
        for s in tl.static_range(SLICES):
            ds += _slice_epilogue(
                parts[s], score, rows, ok, column + s * W, z, dz, a,
                I, GATED, CONCATENATED, BACKWARD, True, True, BM, W,
            )  # fmt: skip
        tl.store(partial + n_tile * plane.to(tl.int64) + slot, ds, mask=ok)
