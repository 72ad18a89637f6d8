"""Token rounding in integers: no sort, no floating-point atomics, the same result every time.

A pair (token, expert) has an int32 key whose order is the expert's preference: the bits of a score
that is not negative are ordered like the score, and pairs that were not chosen are moved below all
chosen ones. An expert keeps the tokens that reach a threshold (least key, cut): a larger key, or
that very key and a token below the cut, which is how ties go to the lower token. The threshold of
n rows is found by a search, each step of which counts a column once.

Keys lie as (E, length): the tokens of an expert side by side, up to a multiple of 16, so that they
are read 16 bytes at a time whatever the number of tokens. A place without a token has no key.
"""

import triton
import triton.language as tl

_SHIFT: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # from the key of a chosen pair to any other's
_HIGHEST: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # above every key
_NOTHING: tl.constexpr = tl.constexpr(-0x80000000)  # below every key


@triton.jit
def _reaches(key, token, least, cut):
    return (key > least) | ((key == least) & (token < cut))


@triton.jit
def _score(key):
    """The score of a key, bit by bit."""
    return tl.where(key < 0, key + _SHIFT, key).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens"])
def keys_kernel(
    scores, ids, keys, chosen_rows, tokens, length, experts, k, scores_stride,
    BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The keys, and the choices added up in chosen_rows. Grid: T/BT × E/BE; one tile each."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    ok = token < tokens
    here = ok[:, None] & (e < experts)[None, :]
    at = token.to(tl.int64)
    score = tl.load(scores + at[:, None] * scores_stride + e[None, :], mask=here, other=0.0)
    bits = tl.where(score > 0, score, 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(score != score, 0x7FC00000, bits)
    chosen = tl.zeros((BT, BE), tl.int1)
    for slot in tl.range(k):
        chosen |= e[None, :] == tl.load(ids + at * k + slot, mask=ok, other=-1)[:, None]
    key = tl.where(ok[:, None], tl.where(chosen, bits, bits - _SHIFT), _NOTHING)
    inside = (token < length)[:, None] & (e < experts)[None, :]
    tl.store(keys + e.to(tl.int64)[None, :] * length + token[:, None], key, mask=inside)
    found = tl.sum(chosen.to(tl.int32), 0)
    tl.atomic_add(chosen_rows + e, found, mask=found > 0, sem="relaxed")


@triton.jit
def _load_keys(column, first, length, CHUNK: tl.constexpr):
    """Tokens first.. of an expert, and their keys."""
    token = first + tl.arange(0, CHUNK)
    return token, tl.load(column + token, mask=token < length, other=_NOTHING)


@triton.jit
def _count(column, held, length, least, cut, CHUNK: tl.constexpr):
    """How many tokens of an expert reach the threshold; `held` are the keys of its first CHUNK.

    They stay in registers, since a search counts ten to twenty times.
    """
    found = _reaches(held, tl.arange(0, CHUNK), least, cut).to(tl.int32)
    for first in tl.range(CHUNK, length, CHUNK):
        token, key = _load_keys(column, first, length, CHUNK)
        found += _reaches(key, token, least, cut).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _two(key, lower, upper):
    """Whether a key reaches each of two others, as two counts in one integer."""
    return (key >= lower).to(tl.int32) | ((key >= upper).to(tl.int32) << 16)


@triton.jit
def _count_two(column, held, length, lower, upper, CHUNK: tl.constexpr):
    """How many keys of an expert reach each of two."""
    found = _two(held, lower, upper)
    for first in tl.range(CHUNK, length, CHUNK):
        _, key = _load_keys(column, first, length, CHUNK)
        found += _two(key, lower, upper)
    few = tl.sum(tl.reshape(found, (CHUNK // 16, 16)), 1)  # 16 bits hold 16 places of 67M tokens
    both = tl.sum((few & 0xFFFF).to(tl.int64) | (few.to(tl.int64) >> 16 << 32), 0)
    return (both & 0xFFFFFFFF).to(tl.int32), (both >> 32).to(tl.int32)


@triton.jit
def _threshold(column, held, length, tokens, rows, up, CHUNK: tl.constexpr):
    """The threshold that exactly `rows` tokens reach: more than chose the expert, or fewer."""
    low = tl.where(up, -_SHIFT, 0)
    high = tl.where(up, 0, _HIGHEST)
    found = tl.where(up, tokens, -1)  # that reach (low, T): all tokens, or not known yet
    while (high - low > 1) & (found != rows):
        # In three parts, since two keys are counted as quickly as one.
        lower = low + tl.maximum((high - low) // 3, 1)
        upper = tl.minimum(lower + (high - low) // 3, high - 1)
        at_lower, at_upper = _count_two(column, held, length, lower, upper, CHUNK)
        found = tl.where(at_upper >= rows, at_upper, tl.where(at_lower >= rows, at_lower, found))
        high = tl.where(at_upper >= rows, high, tl.where(at_lower >= rows, upper, lower))
        low = tl.where(at_upper >= rows, upper, tl.where(at_lower >= rows, lower, low))
    # Only where keys tie is a cut between tokens left to find.
    before = tl.where(found == rows, tokens - 1, 0)
    cut = tokens
    while cut - before > 1:
        middle = before + (cut - before) // 2
        enough = _count(column, held, length, low, middle, CHUNK) >= rows
        cut = tl.where(enough, middle, cut)
        before = tl.where(enough, before, middle)
    return low, cut


@triton.jit
def _score_between(key, token, least, cut, inner_least, inner_cut):
    outer = _reaches(key, token, least, cut)
    return tl.where(outer & (_reaches(key, token, inner_least, inner_cut) == 0), _score(key), 0.0)


@triton.jit
def _sum_between(column, held, length, least, cut, inner_least, inner_cut, CHUNK: tl.constexpr):
    """The scores of the tokens that reach one threshold but not another, higher one."""
    found = _score_between(held, tl.arange(0, CHUNK), least, cut, inner_least, inner_cut)
    for first in tl.range(CHUNK, length, CHUNK):
        token, key = _load_keys(column, first, length, CHUNK)
        found += _score_between(key, token, least, cut, inner_least, inner_cut)
    return tl.sum(found, 0)


@triton.jit
def _up_by_scores(column, held, length, tokens, uniform, down, tile, CHUNK: tl.constexpr):
    """With the probability of (scores that going down drops) / (those and what going up adds)."""
    least, cut = _threshold(column, held, length, tokens, down, False, CHUNK)
    dropped = _sum_between(column, held, length, 0, tokens, least, cut, CHUNK)
    least, cut = _threshold(column, held, length, tokens, down + tile, True, CHUNK)
    added = _sum_between(column, held, length, least, cut, 0, tokens, CHUNK)
    return uniform * (dropped + added) < dropped


@triton.jit(do_not_specialize=["tokens"])
def select_kernel(
    keys, chosen_rows, uniform, rows, least, cut, tokens, length, experts, tile,
    SUBROUTINE: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The rows of each expert and their threshold. Grid: E; a program owns one expert."""
    me = tl.program_id(0)
    e = tl.arange(0, BE)
    count = tl.load(chosen_rows + e, mask=e < experts, other=0)
    rest = count % tile
    possible = (rest > 0) & (count - rest + tile <= tokens)
    if SUBROUTINE == "nr-f":
        ups = 2 * rest > tile
    elif SUBROUTINE == "balance-f":
        # The running error is the smallest number in the class of −Σ rest modulo the tile.
        step = tl.where(possible, rest, 0)
        total = tl.cumsum(step, 0)
        error = (tile // 2 + tile - total % tile) % tile
        before = (tile // 2 + tile - (total - step) % tile) % tile
        ups = error > before
    else:
        ups = (rest > 0) & (SUBROUTINE != "down")
    f = tl.sum(tl.where(e == me, count, 0), 0)
    up = tl.sum((ups & possible & (e == me)).to(tl.int32), 0) > 0
    column = keys + me.to(tl.int64) * length

    n, key, end = f, 0, tokens  # a multiple already: every chosen pair is kept, and no other
    if f % tile > 0:
        n = f - f % tile
        _, held = _load_keys(column, 0, length, CHUNK)
        if SUBROUTINE == "sr-f":
            up = up & (tl.load(uniform + me) * tile < f % tile)
        if SUBROUTINE == "nr-s":
            u = tl.load(uniform + me)
            up = up & _up_by_scores(column, held, length, tokens, u, n, tile, CHUNK)
        n += tl.where(up, tile, 0)
        key, end = _threshold(column, held, length, tokens, n, up, CHUNK)
    tl.store(least + me, key)
    tl.store(cut + me, end)
    tl.store(rows + me, n)


@triton.jit
def _kept(keys, least, cut, token, e, length, experts):
    """Keys (BT, BE) of a tile, and which of its pairs are kept."""
    known = e < experts
    here = (token < length)[:, None] & known[None, :]
    at = e.to(tl.int64)[None, :] * length + token[:, None]
    key = tl.load(keys + at, mask=here, other=_NOTHING)
    lowest = tl.load(least + e, mask=known, other=_HIGHEST)
    end = tl.load(cut + e, mask=known, other=0)
    return key, _reaches(key, token[:, None], lowest[None, :], end[None, :]) & here


@triton.jit(do_not_specialize=["tokens"])
def tally_kernel(
    keys, least, cut, per_token, per_block, tokens, length, experts,
    BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Kept pairs of each token and of each block of BT. Grid: T/BT; a program owns one block."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    found = tl.zeros((BT,), tl.int32)
    for first in tl.range(0, experts, BE):
        _, kept = _kept(keys, least, cut, token, first + tl.arange(0, BE), length, experts)
        found += tl.sum(kept.to(tl.int32), 1)
    tl.store(per_token + token, found, mask=token < tokens)
    tl.store(per_block + tl.program_id(0), tl.sum(found, 0))


@triton.jit(do_not_specialize=["tokens", "slots"])
def emit_kernel(
    keys, least, cut, per_token, per_block, pair_expert, pair_token, pair_score, token_start,
    tokens, length, experts, slots, BT: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The kept pairs, by token and then by expert. Grid: T/BT; a program owns one block of tokens,
    and an even share of the slots, of which it marks the unused ones.
    """
    p, blocks = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros((BP,), tl.int32)
    before = tl.zeros((BP,), tl.int32)
    for first in tl.range(0, blocks, BP):
        q = first + tl.arange(0, BP)
        found = tl.load(per_block + q, mask=q < blocks, other=0)
        total += found
        before += tl.where(q < p, found, 0)
    used = tl.sum(total, 0)

    token = p * BT + tl.arange(0, BT)
    mine = tl.load(per_token + token, mask=token < tokens, other=0)
    end = tl.sum(before, 0) + tl.cumsum(mine, 0)
    start = end - mine
    if p == 0:
        tl.store(token_start, 0)
    tl.store(token_start + 1 + token, end, mask=token < tokens)
    for first in tl.range(0, experts, BE):
        e = first + tl.arange(0, BE)
        key, kept = _kept(keys, least, cut, token, e, length, experts)
        rank = tl.cumsum(kept.to(tl.int32), 1)
        slot = start[:, None] + rank - 1
        tl.store(pair_expert + slot, tl.broadcast_to(e[None, :], (BT, BE)), mask=kept)
        tl.store(pair_token + slot, tl.broadcast_to(token[:, None], (BT, BE)), mask=kept)
        tl.store(pair_score + slot, _score(key), mask=kept)
        start += tl.sum(kept.to(tl.int32), 1)

    share = (slots + blocks - 1) // blocks
    last = tl.minimum((p + 1) * share, slots)
    for first in tl.range(p * share, last, BP):
        slot = first + tl.arange(0, BP)
        unused = (slot >= used) & (slot < last)
        tl.store(pair_expert + slot, -1, mask=unused)
        tl.store(pair_token + slot, tokens, mask=unused)
        tl.store(pair_score + slot, 0.0, mask=unused)
