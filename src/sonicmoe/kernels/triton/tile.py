"""One tile of a grouped product: where it lies, and the loop that accumulates it.

A source of an operand is a tensor descriptor (the copy engine fetches whole boxes and fills with
zeros past the end) or a pointer. Weights are (E, N, K) in memory, or (E, K, N) when `B_KN`.
"""

import triton
import triton.language as tl


@triton.jit
def source_rows(row_token, rows, ok, first_row):
    """Row of the operand that each row of the tile reads; one that exists for rows past the end."""
    if row_token is None:
        return tl.where(ok, rows, first_row)
    else:
        return tl.load(row_token + rows, mask=ok, other=0)


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Left and right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def pairs(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Even and odd columns."""
    return tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))


@triton.jit
def accumulate(
    a, a_rows, a_first_row,
    b, expert, column, column_stride, b_stride_e, b_stride_n, b_stride_k,
    K: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, B_KN: tl.constexpr, TWO_HALVES: tl.constexpr,
    PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """acc[m, j] = Σ_k A[a_rows[m], k] · B[expert, n(j), k] in fp32.

    n(j) = column + j; with `TWO_HALVES` the tile is columns [column, column + BLOCK_N/2) and, beside it,
    the same columns `column_stride` further on: the gate and the up half of concatenated weights.
    """
    offs_k = tl.arange(0, BLOCK_K)
    EVEN_K: tl.constexpr = K % (BLOCK_K * UNROLL) == 0
    if not A_TMA:
        a_ptr = a + a_rows.to(tl.int64)[:, None] * K + offs_k[None, :]
    if not B_TMA:
        j = tl.arange(0, BLOCK_N)
        if TWO_HALVES:
            n = column + j % (BLOCK_N // 2)
            n_ok = n < N // 2
            n += (j // (BLOCK_N // 2)) * column_stride
        else:
            n = column + j
            n_ok = n < N
        b_ptr = b + expert.to(tl.int64) * b_stride_e + n.to(tl.int64)[None, :] * b_stride_n

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K * UNROLL):
        # fp32 adds up in two levels: one long chain erred 1.15e-6 at K = 2056, 8.0e-7 is allowed.
        if UNROLL == 1:
            part = acc
        else:
            part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.static_range(UNROLL):
            k = k0 + step * BLOCK_K
            if A_TMA:
                a_tile = a.load([a_first_row, k])
            elif EVEN_K:
                a_tile = tl.load(a_ptr + k)
            else:
                a_tile = tl.load(a_ptr + k, mask=(k + offs_k < K)[None, :], other=0.0)
            if B_TMA:
                if B_KN and TWO_HALVES:
                    b_tile = tl.reshape(b.load([expert, k, 0, column]), (BLOCK_K, BLOCK_N))
                elif B_KN:
                    b_tile = tl.reshape(b.load([expert, k, column]), (BLOCK_K, BLOCK_N))
                elif TWO_HALVES:
                    b_tile = tl.reshape(b.load([expert, 0, column, k]), (BLOCK_N, BLOCK_K)).T
                else:
                    b_tile = tl.reshape(b.load([expert, column, k]), (BLOCK_N, BLOCK_K)).T
            else:
                b_k = (k + offs_k)[:, None]
                b_ok = n_ok[None, :] & (b_k < K)
                b_tile = tl.load(b_ptr + b_k.to(tl.int64) * b_stride_k, mask=b_ok, other=0.0)
            part = tl.dot(a_tile, b_tile, part, input_precision=PRECISION)
        if UNROLL == 1:
            acc = part
        else:
            acc += part
    return acc


@triton.jit
def _low_rank_blocks(
    u, rows, b, expert, n, first,
    N: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Columns first.. of rows of U and of B, zeros past the last; the rows have to exist."""
    k = first + tl.arange(0, BLOCK_R)
    u_ptr = u + rows.to(tl.int64)[:, None] * RANK + k[None, :]
    b_ptr = b + (expert.to(tl.int64) * N + n)[None, :] * RANK + k[:, None]
    left = tl.load(u_ptr, mask=(k < RANK)[None, :], other=0.0)
    right = tl.load(b_ptr, mask=(k < RANK)[:, None], other=0.0)
    return left, right


@triton.jit
def accumulate_lora(
    a, a_rows, row, w, expert, column, column_stride, w_stride_e, w_stride_n, w_stride_k,
    u, rows, ok, b, n, n_ok,
    K: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    A_TMA: tl.constexpr, B_TMA: tl.constexpr, B_KN: tl.constexpr, TWO_HALVES: tl.constexpr,
    PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`accumulate` and, where there is an adapter U (R, r), B (E, N, r) of low rank, U Bᵀ on top.

    The first blocks of U and B are on their way while the loop turns. Masks come after it, since
    the compiler waits for a block at its first use, and stages an untouched one at once.
    """
    if u is None:
        return accumulate(
            a, a_rows, row, w, expert, column, column_stride, w_stride_e, w_stride_n, w_stride_k,
            K, N, BLOCK_M, BLOCK_N, BLOCK_K, A_TMA, B_TMA, B_KN, TWO_HALVES, PRECISION, UNROLL,
        )  # fmt: skip
    else:
        rows = tl.where(ok, rows, row)
        n = tl.where(n_ok, n, 0)
        left, right = _low_rank_blocks(u, rows, b, expert, n, 0, N, RANK, BLOCK_R)
        acc = accumulate(
            a, a_rows, row, w, expert, column, column_stride, w_stride_e, w_stride_n, w_stride_k,
            K, N, BLOCK_M, BLOCK_N, BLOCK_K, A_TMA, B_TMA, B_KN, TWO_HALVES, PRECISION, UNROLL,
        )  # fmt: skip
        left = tl.where(ok[:, None], left, 0.0)
        right = tl.where(n_ok[None, :], right, 0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        for first in tl.static_range(BLOCK_R, RANK, BLOCK_R):
            left, right = _low_rank_blocks(u, rows, b, expert, n, first, N, RANK, BLOCK_R)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        return acc
