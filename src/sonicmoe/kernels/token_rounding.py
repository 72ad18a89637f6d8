"""Token rounding in integers: no sort, no floating-point atomics, the same result every time.

A pair (token, expert) has an int32 key whose order is the expert's preference: the bits of a score
that is not negative are ordered like the score, and pairs that were not chosen are moved below all
chosen ones. An expert keeps the tokens that reach a threshold (least key, cut): a larger key, or
that very key and a token below the cut, which is how ties go to the lower token. The threshold of
n rows is found by bisection, each step of which counts a column once.
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
    scores, ids, keys, tokens, experts, k, scores_stride, BT: tl.constexpr, BE: tl.constexpr
):
    """keys (E, T), a column of it for each token. Grid: T/BT × E/BE; a program owns one tile."""
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
    key = tl.where(chosen, bits, bits - _SHIFT)
    tl.store(keys + e.to(tl.int64)[None, :] * tokens + token[:, None], key, mask=here)


@triton.jit
def _count(column, tokens, least, cut, CHUNK: tl.constexpr):
    """How many tokens of a column reach the threshold."""
    found = tl.zeros((CHUNK,), tl.int32)
    for first in tl.range(0, tokens, CHUNK):
        token = first + tl.arange(0, CHUNK)
        key = tl.load(column + token, mask=token < tokens, other=_NOTHING)
        found += _reaches(key, token, least, cut).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _threshold(column, tokens, rows, low, high, CHUNK: tl.constexpr):
    """The threshold that `rows` tokens reach; (low, T) is reached by as many or more, high by fewer."""
    found = -1
    while (high - low > 1) & (found != rows):
        middle = low + (high - low) // 2
        found = _count(column, tokens, middle, tokens, CHUNK)
        enough = found >= rows
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    # Only where keys tie at `low` is a cut between tokens left to find.
    before = tl.where(found == rows, tokens - 1, 0)
    cut = tokens + 0
    while cut - before > 1:
        middle = before + (cut - before) // 2
        enough = _count(column, tokens, low, middle, CHUNK) >= rows
        cut = tl.where(enough, middle, cut)
        before = tl.where(enough, before, middle)
    return low, cut


@triton.jit
def _threshold_of_choice(column, tokens, rows, CHUNK: tl.constexpr):
    """Of `rows` tokens among those that chose the expert."""
    least, cut = _HIGHEST + 0, 0
    if rows > 0:
        least, cut = _threshold(column, tokens, rows, 0, _HIGHEST + 0, CHUNK)
    return least, cut


@triton.jit
def _up_by_scores(column, tokens, uniform, least, cut, up_least, up_cut, CHUNK: tl.constexpr):
    """With the probability of what rounding down drops in what it drops and rounding up adds."""
    dropped = tl.zeros((CHUNK,), tl.float32)
    added = tl.zeros((CHUNK,), tl.float32)
    for first in tl.range(0, tokens, CHUNK):
        token = first + tl.arange(0, CHUNK)
        key = tl.load(column + token, mask=token < tokens, other=_NOTHING)
        score = _score(key)
        dropped += tl.where((key >= 0) & (_reaches(key, token, least, cut) == 0), score, 0.0)
        added += tl.where((key < 0) & _reaches(key, token, up_least, up_cut), score, 0.0)
    lost, won = tl.sum(dropped, 0), tl.sum(added, 0)
    return uniform * (lost + won) < lost


@triton.jit(do_not_specialize=["tokens", "spans"])
def select_kernel(
    keys, counts, uniform, least, cut, rows, chosen, tokens, spans, experts, tile,
    SUBROUTINE: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The rows of each expert and their threshold. Grid: E; a program owns one expert.

    counts (spans, E) are the choices of each span of tokens.
    """
    me = tl.program_id(0)
    e = tl.arange(0, BE)
    count = tl.zeros((BE,), tl.int32)
    for first in tl.range(0, spans, BP):
        p = first + tl.arange(0, BP)
        inside = (p < spans)[:, None] & (e < experts)[None, :]
        count += tl.sum(tl.load(counts + p[:, None] * experts + e[None, :], mask=inside, other=0), 0)
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
    up = tl.sum(tl.where((e == me) & possible & ups, 1, 0), 0) > 0
    down_rows = f - f % tile
    column = keys + me.to(tl.int64) * tokens

    # As it stands, every chosen pair is kept: what a multiple of the tile needs.
    key, end, n = 0, tokens + 0, f
    if f % tile > 0:
        if SUBROUTINE == "sr-f":
            up = up & (tl.load(uniform + me) * tile < f % tile)
        if SUBROUTINE == "nr-s":
            key, end = _threshold_of_choice(column, tokens, down_rows, CHUNK)
            n = down_rows
            if up:
                most, most_end = _threshold(column, tokens, down_rows + tile, -_SHIFT, 0, CHUNK)
                u = tl.load(uniform + me)
                if _up_by_scores(column, tokens, u, key, end, most, most_end, CHUNK):
                    key, end, n = most, most_end, down_rows + tile
        else:
            if up:
                n = down_rows + tile
                key, end = _threshold(column, tokens, n, -_SHIFT, 0, CHUNK)
            else:
                n = down_rows
                key, end = _threshold_of_choice(column, tokens, n, CHUNK)
    tl.store(least + me, key)
    tl.store(cut + me, end)
    tl.store(rows + me, n)
    tl.store(chosen + me, f)


@triton.jit
def _kept(keys, least, cut, token, e, tokens, experts):
    """Keys (BT, BE) of a tile, and which of its pairs are kept."""
    known = e < experts
    here = (token < tokens)[:, None] & known[None, :]
    at = e.to(tl.int64)[None, :] * tokens + token[:, None]
    key = tl.load(keys + at, mask=here, other=_NOTHING)
    lowest = tl.load(least + e, mask=known, other=_HIGHEST)
    end = tl.load(cut + e, mask=known, other=0)
    return key, _reaches(key, token[:, None], lowest[None, :], end[None, :]) & here


@triton.jit(do_not_specialize=["tokens"])
def tally_kernel(
    keys, least, cut, per_token, per_block, tokens, experts, BT: tl.constexpr, BE: tl.constexpr
):
    """Kept pairs of each token and of each block of BT. Grid: T/BT; a program owns one block."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    found = tl.zeros((BT,), tl.int32)
    for first in tl.range(0, experts, BE):
        _, kept = _kept(keys, least, cut, token, first + tl.arange(0, BE), tokens, experts)
        found += tl.sum(kept.to(tl.int32), 1)
    tl.store(per_token + token, found, mask=token < tokens)
    tl.store(per_block + tl.program_id(0), tl.sum(found, 0))


@triton.jit(do_not_specialize=["tokens", "slots"])
def emit_kernel(
    keys, least, cut, per_token, per_block, pair_expert, pair_token, pair_score, token_start,
    tokens, experts, slots, BT: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The kept pairs, by token and then by expert. Grid: T/BT; a program owns the pairs of its block
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
        key, kept = _kept(keys, least, cut, token, e, tokens, experts)
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
