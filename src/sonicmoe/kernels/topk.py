"""Top-K with scores, and its backward. Scores and their gradients are fp32."""

import triton
import triton.language as tl


@triton.jit
def _ordered(logits, column):
    """int64 keys: larger logit first, then lower column. NaN ranks above everything, -0 with 0."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    bits = tl.where(logits != logits, 0x7FC00000, bits)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit(do_not_specialize=["tokens"])
def topk_kernel(
    logits, scores, ids, tokens, logits_stride,
    E: tl.constexpr, K: tl.constexpr, SOFTMAX_OVER_TOPK: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The K largest of each row, largest first. Grid: T/BT; a program owns BT tokens."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    ok = token < tokens
    e = tl.arange(0, BE)
    here = ok[:, None] & (e < E)[None, :]
    ptr = logits + token.to(tl.int64)[:, None] * logits_stride + e[None, :]
    row = tl.load(ptr, mask=here, other=0.0).to(tl.float32)
    lowest: tl.constexpr = -0x8000000000000000
    keys = tl.where((e < E)[None, :], _ordered(row, e[None, :]), lowest)

    slot = tl.arange(0, BK)
    picked = tl.zeros((BT, BK), tl.int64)
    for k in tl.range(K):
        best = tl.max(keys, 1)
        picked = tl.where(slot[None, :] == k, best[:, None], picked)
        keys = tl.where(keys == best[:, None], lowest, keys)

    chosen = 0x7FFFFFFF - (picked & 0x7FFFFFFF).to(tl.int32)
    bits = (picked >> 32).to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    value = tl.where((slot < K)[None, :], value, float("-inf"))
    if SOFTMAX_OVER_TOPK:
        weight = tl.exp(value - tl.max(value, 1)[:, None])
        score = weight / tl.sum(weight, 1)[:, None]
    else:
        row = tl.where((e < E)[None, :], row, float("-inf"))
        peak = tl.max(row, 1)[:, None]
        score = tl.exp(value - peak) / tl.sum(tl.exp(row - peak), 1)[:, None]
    out = token.to(tl.int64)[:, None] * K + slot[None, :]
    keep = ok[:, None] & (slot < K)[None, :]
    tl.store(scores + out, score, mask=keep)
    tl.store(ids + out, chosen, mask=keep)


@triton.jit(do_not_specialize=["tokens"])
def topk_backward_kernel(
    dscores, scores, ids, logits, dlogits, tokens, logits_stride,
    E: tl.constexpr, K: tl.constexpr, SOFTMAX_OVER_TOPK: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dlogits (T, E), every element written. Grid: T/BT; a program owns BT tokens."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    ok = token < tokens
    slot = tl.arange(0, BK)
    keep = ok[:, None] & (slot < K)[None, :]
    offs = token.to(tl.int64)[:, None] * K + slot[None, :]
    s = tl.load(scores + offs, mask=keep, other=0.0)
    ds = tl.load(dscores + offs, mask=keep, other=0.0)
    inner = tl.sum(s * ds, 1)

    e = tl.arange(0, BE)
    here = ok[:, None] & (e < E)[None, :]
    if SOFTMAX_OVER_TOPK:
        row = tl.zeros((BT, BE), tl.float32)
    else:
        ptr = logits + token.to(tl.int64)[:, None] * logits_stride + e[None, :]
        row = tl.load(ptr, mask=here, other=0.0).to(tl.float32)
        row = tl.where((e < E)[None, :], row, float("-inf"))
        weight = tl.exp(row - tl.max(row, 1)[:, None])
        row = -weight / tl.sum(weight, 1)[:, None] * inner[:, None]
    for k in tl.range(K):
        # One slot at a time from memory: BT values each of its id, score and gradient.
        at = token.to(tl.int64) * K + k
        chosen = tl.load(ids + at, mask=ok, other=-1)
        score = tl.load(scores + at, mask=ok, other=0.0)
        slope = tl.load(dscores + at, mask=ok, other=0.0)
        if SOFTMAX_OVER_TOPK:
            slope -= inner
        row += tl.where(e[None, :] == chosen[:, None], (score * slope)[:, None], 0.0)
    out = dlogits + token.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(out, row.to(dlogits.dtype.element_ty), mask=here)
