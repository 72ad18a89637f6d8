"""Token rounding in integers: no sort, no floating-point atomics, a deterministic result.

Keys are those of `threshold`, stored as (E, length), where length is T rounded up to a multiple of
32, so that 16-byte loads work for every T. Positions past the last token hold NO_KEY. The kept
pairs are stored as bits (T/32, E): one word for 32 tokens of an expert.
"""

import triton
import triton.language as tl

from .threshold import (
    NO_KEY,
    UNCHOSEN_SHIFT,
    bits_of,
    count_two,
    load_keys,
    reaches,
    score_of,
    threshold_of,
    token_grid,
)

_WORD: tl.constexpr = tl.constexpr(32)  # tokens of a block, one bit each


# --- keys -----------------------------------------------------------------------------------------
@triton.jit
def _load_rows(values, stride, token, column, known):
    """Columns (BLOCK_T, n) of the tokens' rows, in fp32; −∞ where not `known`."""
    at = values + token.to(tl.int64)[:, None] * stride + column
    return tl.load(at, mask=known, other=float("-inf")).to(tl.float32)


@triton.jit
def _load_ids(ids, token, tokens, experts, k, BLOCK_K: tl.constexpr):
    """The chosen experts (BLOCK_T, BLOCK_K), −1 where there is none."""
    slot = tl.arange(0, BLOCK_K)
    here = (token < tokens)[:, None] & (slot < k)[None, :]
    at = token.to(tl.int64)[:, None] * k + slot[None, :]
    id = tl.load(ids + at, mask=here, other=-1).to(tl.int32)
    return tl.where(id < experts, id, -1)


@triton.jit(do_not_specialize=["tokens"])
def keys_kernel(
    values, ids, keys, counts, block_pairs, tokens, length, experts, k, values_stride,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Keys (E, length) of scores, or of logits if SOFTMAX; adds the choices to counts (E,), if any.

    Also clears block_pairs.

    Grid: length/BLOCK_T; a program owns the keys of BLOCK_T tokens.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)[None, :]
    ok, known = (token < tokens)[:, None], e < experts
    id = _load_ids(ids, token, tokens, experts, k, BLOCK_K)
    score = _load_rows(values, values_stride, token, e, ok & known)
    if SOFTMAX:
        peak = tl.max(score, 1)[:, None]
        score = tl.exp(score - peak)
        among = score
        if NORMALIZE:
            among = tl.exp(_load_rows(values, values_stride, token, id, id >= 0) - peak)
        score *= (1 / tl.sum(among, 1))[:, None]
    bits = tl.where(score > 0, score, 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(score != score, 0x7FC00000, bits)
    row = keys + token[:, None]
    tl.store(row + e.to(tl.int64) * length, tl.where(ok, bits - UNCHOSEN_SHIFT, NO_KEY), mask=known)
    tl.store(block_pairs + token // _WORD, 0)
    tl.debug_barrier()  # all are stored as not chosen; now the chosen ones move up
    at = row + id.to(tl.int64) * length
    key = tl.load(at, mask=id >= 0, other=0)
    tl.store(at, bits_of(key), mask=id >= 0)
    if counts is not None:
        tl.debug_barrier()
        # Counted from the keys: ids may name an expert twice, which is one choice.
        key = tl.load(row + e.to(tl.int64) * length, mask=ok & known, other=NO_KEY)
        chosen = tl.sum((key >= 0).to(tl.int32), 0)[None, :]
        tl.atomic_add(counts + e, chosen, mask=known & (chosen > 0), sem="relaxed")


# --- selection ------------------------------------------------------------------------------------
@triton.jit
def _score_between(key, token, least, cut, inner_least, inner_cut):
    """The score of a pair that reaches the outer but not the inner threshold, else zero."""
    outer = reaches(key, token, least, cut)
    return tl.where(outer & (reaches(key, token, inner_least, inner_cut) == 0), score_of(key), 0.0)


@triton.jit
def _sum_between(column, held, length, least, cut, inner_least, inner_cut):
    """Sum of the scores of the tokens that reach the outer but not the inner threshold."""
    PARTS: tl.constexpr = held.shape[0]
    STEP: tl.constexpr = held.shape[1]
    ahead = token_grid(0, PARTS, STEP)
    found = tl.sum(_score_between(held, ahead, least, cut, inner_least, inner_cut), 0)
    for first in tl.range(PARTS * STEP, length, STEP):
        token = first + tl.arange(0, STEP)
        key = load_keys(column, token, length)
        found += _score_between(key, token, least, cut, inner_least, inner_cut)
    return tl.sum(found, 0)


@triton.jit
def _up_by_scores(column, held, length, tokens, chosen, uniform, down, tile):
    """Round up with probability dropped / (dropped + added), sums of the scores at stake."""
    least, cut = threshold_of(column, held, length, tokens, chosen, down, False)
    dropped = _sum_between(column, held, length, 0, tokens, least, cut)
    least, cut = threshold_of(column, held, length, tokens, chosen, down + tile, True)
    added = _sum_between(column, held, length, least, cut, 0, tokens)
    return uniform * (dropped + added) < dropped


@triton.jit
def _write_kept(kept, block_pairs, key, first, least, cut, me, experts, length):
    """Store which tokens from `first` on are kept, as bits; add their number to block_pairs."""
    PARTS: tl.constexpr = key.shape[0]
    BLOCKS: tl.constexpr = key.shape[1] // _WORD
    here = reaches(key, token_grid(first, PARTS, BLOCKS * _WORD), least, cut).to(tl.int32)
    here = tl.reshape(here, (PARTS, BLOCKS, _WORD))
    block = token_grid(first // _WORD, PARTS, BLOCKS)
    inside = block < length // _WORD
    word = tl.sum(here << tl.arange(0, _WORD)[None, None, :], 2)
    tl.store(kept + block.to(tl.int64) * experts + me, word, mask=inside)
    found = tl.sum(here, 2)
    tl.atomic_add(block_pairs + block, found, mask=inside & (found > 0), sem="relaxed")


@triton.jit
def _balanced_up(counts, me, tokens, experts, tile, BLOCK_E: tl.constexpr):
    """Round up if that brings the running rounding error closer to zero.

    After each expert that error is the number nearest to zero that is −Σ rest modulo the tile.
    """
    e = tl.arange(0, BLOCK_E)
    count = tl.load(counts + e, mask=e < experts, other=0)
    rest = tl.where(count - count % tile + tile <= tokens, count % tile, 0)
    before = tl.sum(tl.where(e < me, rest, 0), 0)
    after = tl.sum(tl.where(e <= me, rest, 0), 0)
    half = tile // 2 + tile
    return (half - after % tile) % tile > (half - before % tile) % tile


@triton.jit(do_not_specialize=["tokens"])
def select_kernel(
    keys, counts, uniform, rows, chosen_rows, kept, block_pairs, tokens, length, experts, tile,
    SUBROUTINE: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The number of rows of each expert after rounding, and which tokens it keeps.

    Grid: E; a program owns one expert.
    """
    me = tl.program_id(0)
    if SUBROUTINE == "balance-f":  # before the keys occupy the registers
        balanced_up = _balanced_up(counts, me, tokens, experts, tile, BLOCK_E)
    column = keys + me.to(tl.int64) * length
    held = load_keys(column, token_grid(0, PARTS, STEP), length)
    f, _ = count_two(column, held, length, 0, 0)
    n, least, cut = f, 0, tokens  # already a multiple: exactly the chosen pairs are kept
    if f % tile > 0:
        n = f - f % tile
        up = n + tile <= tokens
        if SUBROUTINE == "nr-f":
            up = up & (2 * (f - n) > tile)
        elif SUBROUTINE == "balance-f":
            up = up & balanced_up
        elif SUBROUTINE == "sr-f":
            up = up & (tl.load(uniform + me) * tile < f - n)
        elif SUBROUTINE == "nr-s":
            if up:  # else there may be too few tokens to round up
                u = tl.load(uniform + me)
                up = _up_by_scores(column, held, length, tokens, f, u, n, tile)
        elif SUBROUTINE == "down":
            up = False
        n += tl.where(up, tile, 0)
        least, cut = threshold_of(column, held, length, tokens, f, n, up)
    tl.store(chosen_rows + me, f)
    tl.store(rows + me, n)
    _write_kept(kept, block_pairs, held, 0, least, cut, me, experts, length)
    for first in tl.range(PARTS * STEP, length, STEP):
        key = load_keys(column, token_grid(first, 1, STEP), length)
        _write_kept(kept, block_pairs, key, first, least, cut, me, experts, length)


# --- pairs ----------------------------------------------------------------------------------------
@triton.jit
def _four_by_four(kept, block, e, experts):
    """(BLOCK_E, 8) int32: one byte each for whether tokens j, j + 8, j + 16, j + 24 are kept."""
    word = tl.load(kept + block.to(tl.int64) * experts + e, mask=e < experts, other=0)
    return (word[:, None] >> tl.arange(0, 8)[None, :]) & 0x01010101


@triton.jit
def _apart(four):
    """(4, 8) from (8,): the four bytes of each integer, in the order of the tokens."""
    return (four[None, :] >> (8 * tl.arange(0, 4))[:, None]) & 0xFF


@triton.jit(do_not_specialize=["tokens", "slots"])
def emit_kernel(
    keys, kept, block_pairs, pair_expert, pair_token, pair_score, token_start,
    tokens, length, experts, slots, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The kept pairs, sorted by token and then by expert, and token_start (T+1,).

    Grid: T/32; a program owns 32 tokens, and an equal share of the slots, whose unused ones it
    marks.
    """
    p, blocks = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros((BLOCK_P,), tl.int32)
    before = tl.zeros((BLOCK_P,), tl.int32)
    for first in tl.range(0, blocks, BLOCK_P):
        q = first + tl.arange(0, BLOCK_P)
        found = tl.load(block_pairs + q, mask=q < blocks, other=0)
        total += found
        before += tl.where(q < p, found, 0)
    used = tl.sum(total, 0)
    begin = tl.sum(before, 0)

    mine = tl.zeros((4, 8), tl.int32)
    for first in tl.range(0, experts, BLOCK_E):
        mine += _apart(tl.sum(_four_by_four(kept, p, first + tl.arange(0, BLOCK_E), experts), 0))
    count = tl.reshape(mine, (_WORD,))
    end = begin + tl.cumsum(count, 0)
    token = p * _WORD + tl.arange(0, _WORD)
    if p == 0:
        tl.store(token_start, 0)
    tl.store(token_start + 1 + token, end, mask=token < tokens)

    # About one pair in 50 is kept. First only its (expert, token) goes to pair_token, then the
    # rest is filled in pair by pair.
    start = tl.reshape(end - count, (4, 8))
    for first in tl.range(0, experts, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        here = _four_by_four(kept, p, e, experts)
        rank = tl.cumsum(here, 0)  # four counts at once, in bytes: BLOCK_E is at most 128
        who = e[:, None] * _WORD + tl.arange(0, 8)[None, :]
        for i in tl.static_range(4):
            row = tl.sum(tl.where(tl.arange(0, 4)[:, None] == i, start, 0), 0)[None, :]
            slot = row + ((rank >> 8 * i) & 0xFF) - 1
            tl.store(pair_token + slot, who + 8 * i, mask=((here >> 8 * i) & 1) > 0)
        start += _apart(tl.sum(here, 0))
    tl.debug_barrier()
    last = begin + tl.sum(count, 0)
    for first in tl.range(begin, last, BLOCK_P):
        slot = first + tl.arange(0, BLOCK_P)
        here = slot < last
        who = tl.load(pair_token + slot, mask=here, other=0)
        expert, mate = who // _WORD, p * _WORD + who % _WORD
        key = tl.load(keys + expert.to(tl.int64) * length + mate, mask=here, other=0)
        tl.store(pair_expert + slot, expert, mask=here)
        tl.store(pair_token + slot, mate, mask=here)
        tl.store(pair_score + slot, score_of(key), mask=here)

    share = (slots + blocks - 1) // blocks
    last = tl.minimum((p + 1) * share, slots)
    for first in tl.range(tl.maximum(p * share, used), last, BLOCK_P):
        slot = first + tl.arange(0, BLOCK_P)
        unused = slot < last
        tl.store(pair_expert + slot, -1, mask=unused)
        tl.store(pair_token + slot, tokens, mask=unused)
        tl.store(pair_score + slot, 0.0, mask=unused)


# --- gradient -------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["tokens"])
def logits_gradient_kernel(
    dscore, logits, ids, pair_expert, token_start, dlogits, tokens, experts, k, logits_stride,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dlogits (T, E) from the gradients of the kept pairs' scores.

    Grid: T/BLOCK_T; a program owns BLOCK_T tokens.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)[None, :]
    ok, known = token < tokens, e < experts
    logit = _load_rows(logits, logits_stride, token, e, ok[:, None] & known)
    weight = tl.exp(logit - tl.max(logit, 1)[:, None])
    among = known
    if ids is not None:
        among = (token[:, None] < 0) & known
        for slot in tl.range(k):
            id = tl.load(ids + token.to(tl.int64) * k + slot, mask=ok, other=-1)
            among |= e == id[:, None]
    score = weight * (1 / tl.sum(tl.where(among, weight, 0.0), 1))[:, None]

    start = tl.load(token_start + token, mask=ok, other=0)
    end = tl.load(token_start + 1 + token, mask=ok, other=0)
    slope = 0.0 * score  # in the layout of `score`: 71 registers; tl.zeros took 206
    for i in tl.range(tl.max(end - start, 0)):
        here = start + i < end
        expert = tl.load(pair_expert + start + i, mask=here, other=-1)
        given = tl.load(dscore + start + i, mask=here, other=0.0).to(tl.float32)
        slope = tl.where(e == expert[:, None], given[:, None], slope)
    inner = tl.sum(score * slope, 1)[:, None]
    grad = score * (slope - tl.where(among, inner, 0.0))
    at = dlogits + token.to(tl.int64)[:, None] * experts + e
    tl.store(at, grad.to(dlogits.dtype.element_ty), mask=ok[:, None] & known)
