"""Keys of token rounding, and the search for an expert's threshold.

A pair (token, expert) has an int32 key, and keys sort like the expert's preference. The bits of a
non-negative score sort like the score; pairs that were not chosen are moved below all chosen ones.
An expert keeps the tokens that reach a threshold (least key, cut): those with a larger key, or with
that key and a token index below the cut. So ties go to the lower token. The threshold for n rows is
found by a search; each step counts the expert's keys once.
"""

import triton
import triton.language as tl

UNCHOSEN_SHIFT: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # moves a pair below all chosen ones
NO_KEY: tl.constexpr = tl.constexpr(-0x80000000)  # below every key


@triton.jit
def reaches(key, token, least, cut):
    """Whether a pair reaches the threshold (least, cut)."""
    return (key > least) | ((key == least) & (token < cut))


@triton.jit
def bits_of(key):
    """The bits of the score, which are also the key of the pair if it is chosen."""
    return tl.where(key < 0, key + UNCHOSEN_SHIFT, key)


@triton.jit
def score_of(key):
    """The score, in fp32, of a key."""
    return bits_of(key).to(tl.float32, bitcast=True)


@triton.jit
def token_grid(first, PARTS: tl.constexpr, STEP: tl.constexpr):
    """(PARTS, STEP) tokens from `first` on; each thread holds some of every part."""
    return first + tl.arange(0, PARTS)[:, None] * STEP + tl.arange(0, STEP)[None, :]


@triton.jit
def load_keys(column, token, length):
    """Keys of tokens of one expert, whose keys begin at `column`."""
    return tl.load(column + token, mask=token < length, other=NO_KEY)


@triton.jit
def _count(column, held, length, least, cut):
    """How many tokens of an expert reach the threshold.

    `held` (PARTS, STEP) are the keys of its first tokens. They stay in registers, since a search
    counts about seven times.
    """
    PARTS: tl.constexpr = held.shape[0]
    STEP: tl.constexpr = held.shape[1]
    found = tl.sum(reaches(held, token_grid(0, PARTS, STEP), least, cut).to(tl.int32), 0)
    for first in tl.range(PARTS * STEP, length, STEP):
        token = first + tl.arange(0, STEP)
        found += reaches(load_keys(column, token, length), token, least, cut).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _two(key, lower, upper):
    """Whether a key is at least `lower` and at least `upper`: two 16-bit counts in one integer."""
    return (key >= lower).to(tl.int32) | ((key >= upper).to(tl.int32) << 16)


@triton.jit
def count_two(column, held, length, lower, upper):
    """How many keys of an expert are at least `lower`, and how many at least `upper`."""
    PARTS: tl.constexpr = held.shape[0]
    STEP: tl.constexpr = held.shape[1]
    found = tl.sum(_two(held, lower, upper), 0)  # 16 bits hold the parts of 67M tokens
    for first in tl.range(PARTS * STEP, length, STEP):
        found += _two(load_keys(column, first + tl.arange(0, STEP), length), lower, upper)
    both = tl.sum((found & 0xFFFF).to(tl.int64) | (found.to(tl.int64) >> 16 << 32), 0)
    return both.to(tl.int32), (both >> 32).to(tl.int32)


@triton.jit
def _bounds(column, held, length, up):
    """The lowest and the highest key of the candidates, which make the search a third shorter.

    Candidates are the tokens that did not choose the expert if it rounds up, else those that did.
    As unsigned numbers, the keys of chosen pairs come first, then NO_KEY, then all other keys.
    """
    PARTS: tl.constexpr = held.shape[0]
    STEP: tl.constexpr = held.shape[1]
    shift = tl.where(up, UNCHOSEN_SHIFT, 0)  # puts candidates lowest as unsigned numbers
    flip = tl.where(up, NO_KEY, 0)  # puts candidates highest as signed numbers
    lowest = tl.min((held + shift).to(tl.uint32, bitcast=True), 0)
    highest = tl.max(held ^ flip, 0)
    for first in tl.range(PARTS * STEP, length, STEP):
        key = load_keys(column, first + tl.arange(0, STEP), length)
        lowest = tl.minimum(lowest, (key + shift).to(tl.uint32, bitcast=True))
        highest = tl.maximum(highest, key ^ flip)
    return tl.min(lowest, 0).to(tl.int32, bitcast=True) - shift, tl.max(highest, 0) ^ flip


@triton.jit
def threshold_of(column, held, length, tokens, chosen, rows, up):
    """The threshold that exactly `rows` tokens reach; more than `chosen` if `up`, else fewer."""
    low, highest = _bounds(column, held, length, up)
    high = highest + 1
    # The number that reach (low, T): always at least `rows`. Fewer reach (high, T).
    found = tl.where(up, tokens, chosen)
    if rows == 0:
        low, found = high, 0
    while (high - low > 1) & (found != rows):
        # Ternary search: counting two keys takes hardly longer than counting one.
        lower = low + tl.maximum((high - low) // 3, 1)
        upper = tl.minimum(lower + (high - low) // 3, high - 1)
        at_lower, at_upper = count_two(column, held, length, lower, upper)
        found = tl.where(at_upper >= rows, at_upper, tl.where(at_lower >= rows, at_lower, found))
        high = tl.where(at_upper >= rows, high, tl.where(at_lower >= rows, upper, lower))
        low = tl.where(at_upper >= rows, upper, tl.where(at_lower >= rows, lower, low))
    # If keys tie at the threshold, find the cut between their tokens.
    before = tl.where(found == rows, tokens - 1, 0)
    cut = tokens
    while cut - before > 1:
        middle = before + (cut - before) // 2
        enough = _count(column, held, length, low, middle) >= rows
        cut = tl.where(enough, middle, cut)
        before = tl.where(enough, before, middle)
    return low, cut
