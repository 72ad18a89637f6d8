"""Weight gradients dW_e = L_eᵀ R_e, a sum over the rows of one expert, and bias gradients.

The rows of a long expert are split into spans, see `spans`.
"""

import triton
import triton.language as tl

from ..spans import any_is_split, rows_of
from ..tile_order import in_bands


@triton.jit
def _row_block(
    source, row_token, k, end, column,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """(BLOCK_K, BLOCK_C) of the rows from k on, gathered with a token map; zero past COLUMNS.

    In the LAST block of an expert rows past its end are zeroed: they are another expert's and may
    hold NaN. In the other blocks all rows are the expert's.
    """
    rows = k + tl.arange(0, BLOCK_K)
    ok = rows < end
    if TMA:
        block = source.load([k, column])
        if LAST:
            block = tl.where(ok[:, None], block, 0.0)
    else:
        c = column + tl.arange(0, BLOCK_C)
        if row_token is not None:
            if LAST:
                rows = tl.load(row_token + rows, mask=ok, other=0)
            else:
                rows = tl.load(row_token + rows)
        ptr = source + rows.to(tl.int64)[:, None] * COLUMNS + c[None, :]
        if LAST:
            block = tl.load(ptr, mask=ok[:, None] & (c < COLUMNS)[None, :], other=0.0)
        elif COLUMNS % BLOCK_C == 0:
            block = tl.load(ptr)
        else:
            block = tl.load(ptr, mask=(c < COLUMNS)[None, :], other=0.0)
    return block


@triton.jit(do_not_specialize=["span", "places"])
def wgrad_kernel(
    left, left_token, right, right_token, out, partial, expert_start, tiles, num_experts, span,
    places,
    M: tl.constexpr, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    L_TMA: tl.constexpr, R_TMA: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out[e] (M, N) = Σ_r left[r, :]ᵀ right[r, :] over the rows of expert e, zeros without rows.

    With ADD the sums are added to `out`. With `partial` (places, M, N) the sums of spans go there,
    and `spans.sum_spans_kernel` adds them up. `left` and `right` are gathered with a token map.

    Grid: any number of programs; each walks over (expert or span, M-tile, N-tile) and owns the
    tiles that it writes.
    """
    m_tiles: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    groups = num_experts
    if partial is not None:
        groups += tl.where(any_is_split(tiles, span), places, 0)
    total = groups * m_tiles * n_tiles
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        group = t // (m_tiles * n_tiles)
        m_tile, n_tile = in_bands(t % (m_tiles * n_tiles), m_tiles, n_tiles, BLOCK_M, BLOCK_N)
        m0 = m_tile * BLOCK_M
        n0 = n_tile * BLOCK_N
        expert = tl.minimum(group, num_experts - 1)
        start = tl.load(expert_start + expert)
        end = tl.load(expert_start + expert + 1)
        if partial is not None:
            _, start, end = rows_of(group, start, end, expert_start, num_experts, span)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        last = start + (end - start) // BLOCK_K * BLOCK_K
        for k in tl.range(start, last, BLOCK_K):
            l_tile = _row_block(left, left_token, k, end, m0, M, BLOCK_K, BLOCK_M, L_TMA, False)
            r_tile = _row_block(right, right_token, k, end, n0, N, BLOCK_K, BLOCK_N, R_TMA, False)
            acc = tl.dot(l_tile.T, r_tile, acc, input_precision=PRECISION)
        if last < end:
            l_tile = _row_block(left, left_token, last, end, m0, M, BLOCK_K, BLOCK_M, L_TMA, True)
            r_tile = _row_block(right, right_token, last, end, n0, N, BLOCK_K, BLOCK_N, R_TMA, True)
            acc = tl.dot(l_tile.T, r_tile, acc, input_precision=PRECISION)
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0 + tl.arange(0, BLOCK_N)
        inside = (m < M)[:, None] & (n < N)[None, :]
        if group < num_experts:
            inside &= end >= 0
            ptr = out + (group.to(tl.int64) * M + m[:, None]) * N + n[None, :]
            if ADD:
                acc += tl.load(ptr, mask=inside, other=0.0)
            tl.store(ptr, acc.to(out.dtype.element_ty), mask=inside)
        elif partial is not None:
            inside &= end >= 0
            place = (group - num_experts).to(tl.int64)
            tl.store(partial + (place * M + m[:, None]) * N + n[None, :], acc, mask=inside)


@triton.jit
def bias_gradient_kernel(
    source, row_token, scores, row_slot, out, expert_start,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e, :] = Σ_r score_r · source[r, :] over the rows of expert e, gathered with a token map.

    Grid: (E, N/BLOCK_N); a program owns BLOCK_N columns of one expert's gradient.
    """
    expert = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(expert_start + expert)
    end = tl.load(expert_start + expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(start, end, BLOCK_M):
        rows = k + tl.arange(0, BLOCK_M)
        ok = rows < end
        if row_token is None:
            src = rows
        else:
            src = tl.load(row_token + rows, mask=ok, other=0)
        ptr = source + src.to(tl.int64)[:, None] * N + n[None, :]
        block = tl.load(ptr, mask=ok[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        if scores is not None:
            if row_slot is None:
                slot = rows
            else:
                slot = tl.load(row_slot + rows, mask=ok, other=0)
            block *= tl.load(scores + slot, mask=ok, other=0.0)[:, None]
        acc += block
    tl.store(out + expert.to(tl.int64) * N + n, tl.sum(acc, 0).to(out.dtype.element_ty), mask=n < N)
