"""Combine, the weighted sum of a token's expert outputs, and small kernels around the GEMMs."""

import triton
import triton.language as tl

from .tile_order import load_tile


@triton.jit(do_not_specialize=["slots"])
def combine_kernel(
    y, scores, slot_row, token_start, out,
    K, slots, H: tl.constexpr, OUT_STRIDE: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ_k score · y[row of slot k of t], in fp32, in the order of the slots.

    Rows of `out` are OUT_STRIDE elements apart: it may be a slice of columns. UNROLL slots are
    loaded before the first is used, to have that many loads in flight.

    Grid: (T, H/BLOCK_H); a program owns BLOCK_H columns of one token.
    """
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if token_start is None:
        first = token * K
        last = first + K
    else:
        first = tl.maximum(tl.load(token_start + token).to(tl.int64), 0)
        last = tl.minimum(tl.load(token_start + token + 1).to(tl.int64), slots)
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for slot in tl.range(first, last, UNROLL):
        for j in tl.static_range(UNROLL):
            row = tl.load(slot_row + slot + j, mask=slot + j < last, other=-1)
            here = row >= 0
            value = tl.load(y + row.to(tl.int64) * H + h, mask=here & (h < H), other=0.0)
            value = value.to(tl.float32)
            if scores is not None:
                score = tl.load(scores + slot + j, mask=here, other=0.0)
                value *= score
            acc += value
    tl.store(out + token * OUT_STRIDE + h, acc.to(out.dtype.element_ty), mask=h < H)


@triton.jit(do_not_specialize=["slots", "plane"])
def sum_partials_kernel(
    partial, slot_row, expert_start, out, slots, plane, num_experts,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dscores[slot] = Σ of its PARTS partial sums; zero for slots without a local expert.

    Grid: S/BLOCK; a program owns BLOCK slots.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < slots
    if slot_row is None:
        alive = (
            inside & (slot >= tl.load(expert_start)) & (slot < tl.load(expert_start + num_experts))
        )
    else:
        alive = inside & (tl.load(slot_row + slot, mask=inside, other=-1) >= 0)
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        acc += tl.load(partial + part * plane.to(tl.int64) + slot, mask=alive, other=0.0)
    tl.store(out + slot, acc, mask=inside)


@triton.jit
def bias_score_kernel(
    dout, row_token, row_slot, bias, partial, tiles,
    H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """partial[slot] = ⟨dO, b2⟩, the bias's part of the score gradient.

    Grid: one program per tile; it owns the slots of the tile's rows.
    """
    index = tl.program_id(0)
    if index < tl.load(tiles):
        expert, start, end, number = load_tile(tiles, index)
        rows = start + number * BLOCK_M + tl.arange(0, BLOCK_M)
        ok = rows < end
        if row_token is None:
            src = rows
            slot = rows
        else:
            src = tl.load(row_token + rows, mask=ok, other=0)
            slot = tl.load(row_slot + rows, mask=ok, other=0)
        acc = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        for h0 in tl.range(0, H, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            ptr = dout + src.to(tl.int64)[:, None] * H + h[None, :]
            do = tl.load(ptr, mask=ok[:, None] & (h < H)[None, :], other=0.0).to(tl.float32)
            b = tl.load(bias + expert.to(tl.int64) * H + h, mask=h < H, other=0.0).to(tl.float32)
            acc += do * b[None, :]
        tl.store(partial + slot, tl.sum(acc, 1), mask=ok)


@triton.jit(do_not_specialize=["count"])
def zero_tail_kernel(
    y, expert_start, tiles, count, num_experts,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[r] = 0 for the rows of no expert, or NaN if the tile table is marked as invalid.

    Grid: R/BLOCK_M; a program owns BLOCK_M rows.
    """
    fill = tl.where(tl.load(tiles + 2) != 0, float("nan"), 0.0)
    start = tl.load(expert_start)
    end = tl.load(expert_start + num_experts)
    first = tl.program_id(0) * BLOCK_M
    if (first < start) | (first + BLOCK_M > end):
        rows = first + tl.arange(0, BLOCK_M)
        ok = ((rows < start) | (rows >= end)) & (rows < count)
        for n0 in tl.range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            ptr = y + rows.to(tl.int64)[:, None] * N + n[None, :]
            value = tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32) * fill
            tl.store(ptr, value.to(y.dtype.element_ty), mask=ok[:, None] & (n < N)[None, :])
