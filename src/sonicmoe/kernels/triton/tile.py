"""One tile of a grouped GEMM: the loop over K that accumulates it in fp32.

Operands are read through a tensor descriptor (TMA loads whole boxes and fills with zeros past the
end) or through a pointer. Weights are (E, N, K) in memory, or (E, K, N) if WEIGHT_LAYOUT is "kn".
"""

import triton
import triton.language as tl


@triton.jit
def source_rows(row_token, rows, ok, first_row):
    """Row of A that each row of the tile reads; rows past the expert's end read an existing one."""
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
def _weight_columns(column, N: tl.constexpr, BLOCK_N: tl.constexpr, GATE_UP: tl.constexpr):
    """Columns n (BLOCK_N,) of the weights that a tile covers, and which of them exist.

    n = column, column + 1, ...; for concatenated gate/up weights BLOCK_N/2 gate columns from
    `column` on, then the up columns that belong to them, N/2 further on.
    """
    j = tl.arange(0, BLOCK_N)
    if GATE_UP == "concatenated":
        n = column + j % (BLOCK_N // 2)
        n_ok = n < N // 2
        n += (j // (BLOCK_N // 2)) * (N // 2)
    else:
        n = column + j
        n_ok = n < N
    return n, n_ok


@triton.jit
def _accumulate_dense(
    a, a_rows, a_first_row, w, expert, column, w_stride_e, w_stride_n, w_stride_k,
    K: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_TMA: tl.constexpr, W_TMA: tl.constexpr, WEIGHT_LAYOUT: tl.constexpr, GATE_UP: tl.constexpr,
    PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """acc[m, j] = Σ_k A[a_rows[m], k] · W[expert, n(j), k] for the columns of `_weight_columns`."""
    offs_k = tl.arange(0, BLOCK_K)
    EVEN_K: tl.constexpr = K % (BLOCK_K * UNROLL) == 0
    if not A_TMA:
        a_ptr = a + a_rows.to(tl.int64)[:, None] * K + offs_k[None, :]
    if not W_TMA:
        n, n_ok = _weight_columns(column, N, BLOCK_N, GATE_UP)
        w_ptr = w + expert.to(tl.int64) * w_stride_e + n.to(tl.int64)[None, :] * w_stride_n

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K * UNROLL):
        # fp32 is summed in two levels: one chain had an error of 1.15e-6 at K = 2056, above the
        # budget of 8.0e-7.
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
            if W_TMA:
                if WEIGHT_LAYOUT == "kn" and GATE_UP == "concatenated":
                    w_tile = tl.reshape(w.load([expert, k, 0, column]), (BLOCK_K, BLOCK_N))
                elif WEIGHT_LAYOUT == "kn":
                    w_tile = tl.reshape(w.load([expert, k, column]), (BLOCK_K, BLOCK_N))
                elif GATE_UP == "concatenated":
                    w_tile = tl.reshape(w.load([expert, 0, column, k]), (BLOCK_N, BLOCK_K)).T
                else:
                    w_tile = tl.reshape(w.load([expert, column, k]), (BLOCK_N, BLOCK_K)).T
            else:
                w_k = (k + offs_k)[:, None]
                w_ok = n_ok[None, :] & (w_k < K)
                w_tile = tl.load(w_ptr + w_k.to(tl.int64) * w_stride_k, mask=w_ok, other=0.0)
            part = tl.dot(a_tile, w_tile, part, input_precision=PRECISION)
        if UNROLL == 1:
            acc = part
        else:
            acc += part
    return acc


@triton.jit
def _lora_blocks(
    lora_u, rows, lora_b, expert, n, first,
    N: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_R columns from `first` on of U and B, zeros past the rank; all rows must exist."""
    k = first + tl.arange(0, BLOCK_R)
    u_ptr = lora_u + rows.to(tl.int64)[:, None] * RANK + k[None, :]
    b_ptr = lora_b + (expert.to(tl.int64) * N + n)[None, :] * RANK + k[:, None]
    left = tl.load(u_ptr, mask=(k < RANK)[None, :], other=0.0)
    right = tl.load(b_ptr, mask=(k < RANK)[:, None], other=0.0)
    return left, right


@triton.jit
def accumulate(
    a, a_rows, first_row, w, expert, column, w_stride_e, w_stride_n, w_stride_k,
    lora_u, lora_b, rows, ok,
    K: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    A_TMA: tl.constexpr, W_TMA: tl.constexpr, WEIGHT_LAYOUT: tl.constexpr, GATE_UP: tl.constexpr,
    PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The tile A Wᵀ, or A Wᵀ + U Bᵀ with a LoRA adapter: U (R, r) and B (E, N, r), else None.

    The first blocks of U and B are loaded before the loop over K, to hide their latency under it.
    They are masked after the loop: the compiler waits for a load at its first use.
    """
    if lora_u is None:
        return _accumulate_dense(
            a, a_rows, first_row, w, expert, column, w_stride_e, w_stride_n, w_stride_k,
            K, N, BLOCK_M, BLOCK_N, BLOCK_K,
            A_TMA, W_TMA, WEIGHT_LAYOUT, GATE_UP, PRECISION, UNROLL,
        )  # fmt: skip
    else:
        n, n_ok = _weight_columns(column, N, BLOCK_N, GATE_UP)
        rows = tl.where(ok, rows, first_row)
        n = tl.where(n_ok, n, 0)
        left, right = _lora_blocks(lora_u, rows, lora_b, expert, n, 0, N, RANK, BLOCK_R)
        acc = _accumulate_dense(
            a, a_rows, first_row, w, expert, column, w_stride_e, w_stride_n, w_stride_k,
            K, N, BLOCK_M, BLOCK_N, BLOCK_K,
            A_TMA, W_TMA, WEIGHT_LAYOUT, GATE_UP, PRECISION, UNROLL,
        )  # fmt: skip
        left = tl.where(ok[:, None], left, 0.0)
        right = tl.where(n_ok[None, :], right, 0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        for first in tl.static_range(BLOCK_R, RANK, BLOCK_R):
            left, right = _lora_blocks(lora_u, rows, lora_b, expert, n, first, N, RANK, BLOCK_R)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        return acc
