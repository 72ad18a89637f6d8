"""Top-K of the logits with softmax scores, and its backward pass. Scores are fp32."""

import triton
import triton.language as tl


@triton.jit
def to_keys(logits, column):
    """Integer keys that sort like the choice: larger logit first, then lower column.

    NaN ranks above everything, -0 equals 0. 16-bit logits make 32-bit keys, others 64-bit keys:
    small keys pay off, since the search compares every key K times.
    """
    if logits.dtype.primitive_bitwidth == 16:
        bits = tl.where(logits == 0, 0, logits.to(tl.int16, bitcast=True).to(tl.int32))
        bits = tl.where(logits != logits, 0x7FFF, bits)
        return (tl.where(bits < 0, bits ^ 0x7FFF, bits) << 16) | (0xFFFF - column)
    else:
        bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
        bits = tl.where(logits != logits, 0x7FC00000, bits)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def from_keys(keys, dtype: tl.constexpr):
    """Column and logit, in fp32, of keys made from logits of `dtype`."""
    if dtype.primitive_bitwidth == 16:
        bits = keys >> 16
        raw = tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int16)
        return 0xFFFF - (keys & 0xFFFF), raw.to(dtype, bitcast=True).to(tl.float32)
    else:
        bits = (keys >> 32).to(tl.int32)
        raw = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32), raw.to(tl.float32, bitcast=True)


@triton.jit
def largest(
    keys, lowest: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr
):
    """(BLOCK_T, BLOCK_K): the K largest keys of each row, largest first. Keys must differ."""
    slot = tl.arange(0, BLOCK_K)
    picked = tl.zeros((BLOCK_T, BLOCK_K), keys.dtype)
    for k in tl.range(K):
        best = tl.max(keys, 1)
        picked = tl.where(slot[None, :] == k, best[:, None], picked)
        keys = tl.where(keys == best[:, None], lowest, keys)
    return picked


@triton.jit(do_not_specialize=["tokens"])
def topk_kernel(
    logits, scores, ids, tokens, logits_stride,
    E: tl.constexpr, K: tl.constexpr, SOFTMAX_OVER_TOPK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scores and ids (T, K) of the K largest logits of each token, largest first.

    Grid: T/BLOCK_T; a program owns BLOCK_T tokens.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = token < tokens
    e = tl.arange(0, BLOCK_E)
    here = ok[:, None] & (e < E)[None, :]
    ptr = logits + token.to(tl.int64)[:, None] * logits_stride + e[None, :]
    NARROW: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16 and E <= 0x10000
    lowest: tl.constexpr = -0x80000000 if NARROW else -0x8000000000000000
    raw = tl.load(ptr, mask=here, other=0.0)
    row = raw.to(tl.float32)
    if not NARROW:
        raw = row
    keys = tl.where((e < E)[None, :], to_keys(raw, e[None, :]), lowest)

    slot = tl.arange(0, BLOCK_K)
    chosen, value = from_keys(largest(keys, lowest, K, BLOCK_T, BLOCK_K), raw.dtype)
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
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dlogits (T, E) from dscores (T, K); every element is written.

    Grid: T/BLOCK_T; a program owns BLOCK_T tokens.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = token < tokens
    slot = tl.arange(0, BLOCK_K)
    keep = ok[:, None] & (slot < K)[None, :]
    offs = token.to(tl.int64)[:, None] * K + slot[None, :]
    s = tl.load(scores + offs, mask=keep, other=0.0)
    ds = tl.load(dscores + offs, mask=keep, other=0.0)
    inner = tl.sum(s * ds, 1)

    e = tl.arange(0, BLOCK_E)
    here = ok[:, None] & (e < E)[None, :]
    if SOFTMAX_OVER_TOPK:
        row = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    else:
        ptr = logits + token.to(tl.int64)[:, None] * logits_stride + e[None, :]
        row = tl.load(ptr, mask=here, other=0.0).to(tl.float32)
        row = tl.where((e < E)[None, :], row, float("-inf"))
        weight = tl.exp(row - tl.max(row, 1)[:, None])
        row = -weight / tl.sum(weight, 1)[:, None] * inner[:, None]
    for k in tl.range(K):
        # Loaded again, one slot at a time: a column of the (BLOCK_T, BLOCK_K) tiles above.
        at = token.to(tl.int64) * K + k
        chosen = tl.load(ids + at, mask=ok, other=-1)
        score = tl.load(scores + at, mask=ok, other=0.0)
        slope = tl.load(dscores + at, mask=ok, other=0.0)
        if SOFTMAX_OVER_TOPK:
            slope -= inner
        row += tl.where(e[None, :] == chosen[:, None], (score * slope)[:, None], 0.0)
    out = dlogits + token.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(out, row.to(dlogits.dtype.element_ty), mask=here)
