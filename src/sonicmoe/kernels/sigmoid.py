"""Top-K of sigmoid(logits) + bias, where the bias changes the choice only; in fp32."""

import triton
import triton.language as tl

from .topk import from_keys, largest, to_keys

_LEAST: tl.constexpr = tl.constexpr(1e-20)  # added to a divisor
_LOWEST: tl.constexpr = tl.constexpr(-0x8000000000000000)  # below every key


@triton.jit
def _only_best_groups(
    keys, e, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Keys, _LOWEST outside the KEPT groups with the largest sum of their two best."""
    g = tl.arange(0, BLOCK_G)
    sums = tl.zeros((BLOCK_T, BLOCK_G), tl.float32)
    for group in tl.range(GROUPS):
        of_group = tl.where((e // SIZE == group)[None, :], keys, _LOWEST)
        best = tl.max(of_group, 1)
        value = from_keys(best, tl.float32)[1]
        if SIZE > 1:
            others = tl.where(of_group == best[:, None], _LOWEST, of_group)
            value += from_keys(tl.max(others, 1), tl.float32)[1]
        sums = tl.where(g[None, :] == group, value[:, None], sums)
    ranks = tl.where((g < GROUPS)[None, :], to_keys(sums, g[None, :]), _LOWEST)
    kept = tl.full(keys.shape, _LOWEST, tl.int64)
    for _ in tl.range(KEPT):
        best = tl.max(ranks, 1)
        ranks = tl.where(ranks == best[:, None], _LOWEST, ranks)
        winner = from_keys(best, tl.float32)[0]
        kept = tl.where((e // SIZE)[None, :] == winner[:, None], keys, kept)
    return kept


@triton.jit(do_not_specialize=["tokens"])
def sigmoid_topk_kernel(
    logits, bias, scores, affinity, ids, scale, tokens, logits_stride,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Scores and ids (T, K) of the K largest sigmoid(logits) + bias, largest first.

    affinity (T, K) holds their sigmoids, without scale and normalization, for the backward pass.

    Grid: T/BLOCK_T; a program owns BLOCK_T tokens.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = token < tokens
    e = tl.arange(0, BLOCK_E)
    row = logits + token.to(tl.int64)[:, None] * logits_stride
    value = tl.load(row + e[None, :], mask=ok[:, None] & (e < E)[None, :], other=0.0)
    rank = tl.sigmoid(value.to(tl.float32))
    rank += tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    keys = tl.where((e < E)[None, :], to_keys(rank, e[None, :]), _LOWEST)
    if GROUPS != KEPT:
        keys = _only_best_groups(keys, e, E // GROUPS, GROUPS, KEPT, BLOCK_T, BLOCK_G)

    slot = tl.arange(0, BLOCK_K)
    keep = ok[:, None] & (slot < K)[None, :]
    picked = largest(keys, _LOWEST, K, BLOCK_T, BLOCK_K)
    chosen = tl.where(keep, from_keys(picked, tl.float32)[0], 0)
    a = tl.sigmoid(tl.load(row + chosen, mask=keep, other=0.0).to(tl.float32))
    a = tl.where((slot < K)[None, :], a, 0.0)
    score = a * scale
    if NORMALIZE:
        score /= (tl.sum(a, 1) + _LEAST)[:, None]
    out = token.to(tl.int64)[:, None] * K + slot[None, :]
    tl.store(scores + out, score, mask=keep)
    tl.store(affinity + out, a, mask=keep)
    tl.store(ids + out, chosen, mask=keep)


@triton.jit(do_not_specialize=["tokens"])
def sigmoid_topk_backward_kernel(
    dscores, affinity, ids, dlogits, scale, tokens,
    E: tl.constexpr, K: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dlogits (T, E) from dscores (T, K); every element is written.

    Grid: T/BLOCK_T; a program owns BLOCK_T tokens.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = token < tokens
    inner = tl.zeros((BLOCK_T,), tl.float32)
    total = tl.full((BLOCK_T,), 1.0, tl.float32)
    if NORMALIZE:
        slot = tl.arange(0, BLOCK_K)
        keep = ok[:, None] & (slot < K)[None, :]
        offs = token.to(tl.int64)[:, None] * K + slot[None, :]
        every = tl.load(affinity + offs, mask=keep, other=0.0)
        total = tl.sum(every, 1) + _LEAST
        inner = tl.sum(every * tl.load(dscores + offs, mask=keep, other=0.0), 1) / total
    e = tl.arange(0, BLOCK_E)
    row = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for k in tl.range(K):
        at = token.to(tl.int64) * K + k
        chosen = tl.load(ids + at, mask=ok, other=-1)
        a = tl.load(affinity + at, mask=ok, other=0.0)
        slope = (tl.load(dscores + at, mask=ok, other=0.0) - inner) / total * scale
        row += tl.where(e[None, :] == chosen[:, None], (slope * a * (1 - a))[:, None], 0.0)
    out = dlogits + token.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(out, row.to(dlogits.dtype.element_ty), mask=ok[:, None] & (e < E)[None, :])
