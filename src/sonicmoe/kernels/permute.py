"""The permutation of slots into rows sorted by expert: a stable counting sort on the GPU.

Slots are split into chunks of CHUNK. `count_kernel` counts the experts of each chunk, `scan_kernel`
turns the counts into rows, `place_kernel` sorts a chunk by expert in registers and gives every slot
its row. If there is only one chunk, `one_chunk_kernel` does all of it. Within an expert, rows keep
the order of their slots, so the result is deterministic.

The tile table has a header (tiles, rows of the longest expert, invalid, 0) and then for each tile
an entry (expert, its first row, its end row, number of the tile within the expert).
"""

import triton
import triton.language as tl

_SHIFT: tl.constexpr = tl.constexpr(
    16
)  # two numbers in one integer; the lower counts slots of a chunk
_LOWER: tl.constexpr = tl.constexpr(0xFFFF)


@triton.jit
def _load_ids(ids, slot, inside, num_experts):
    """Expert of each slot; `num_experts` for a slot without a local expert."""
    expert = tl.load(ids + slot, mask=inside, other=-1).to(tl.int64)
    here = (expert >= 0) & (expert < num_experts)
    return tl.where(here, expert, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["slots"])
def count_kernel(
    ids, counts, totals, slots, num_experts, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr
):
    """counts[p, e]: the slots of chunk p with expert e and, shifted by 16, with a lower expert.

    The slots of all chunks are added to totals (E,). Without counts only that.

    Grid: chunks; a program owns its row of counts.
    """
    p = tl.program_id(0)
    slot = p * CHUNK + tl.arange(0, CHUNK)
    expert = _load_ids(ids, slot, slot < slots, num_experts)
    histogram = tl.histogram(expert, BLOCK_E, mask=expert < num_experts)
    e = tl.arange(0, BLOCK_E)
    if counts is not None:
        lower = tl.cumsum(histogram, 0) - histogram
        at = counts + p.to(tl.int64) * num_experts + e
        tl.store(at, lower << _SHIFT | histogram, mask=e < num_experts)
    tl.atomic_add(totals + e, histogram, mask=histogram > 0, sem="relaxed")


@triton.jit
def _write_tiles(
    tiles, rows, invalid, mine, row, end, tile, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Write the entries of experts `mine`; the first program also writes the header.

    `rows` holds the rows of all experts. The experts `mine` have rows `row` to `end`, and `tile` is
    the number of their first tile.
    """
    if tl.program_id(0) == 0:
        tl.store(tiles, tl.sum((rows + BLOCK_M - 1) // BLOCK_M, 0))
        tl.store(tiles + 1, tl.max(rows, 0))
        tl.store(tiles + 2, invalid)
        tl.store(tiles + 3, 0)
    n = (end - row + BLOCK_M - 1) // BLOCK_M
    for first in tl.range(0, tl.max(n, 0), AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)[None, :]
        entry = tiles + 4 * (1 + tile[:, None] + i)
        tl.store(entry, tl.broadcast_to(mine[:, None], entry.shape), mask=i < n[:, None])
        tl.store(entry + 1, tl.broadcast_to(row[:, None], entry.shape), mask=i < n[:, None])
        tl.store(entry + 2, tl.broadcast_to(end[:, None], entry.shape), mask=i < n[:, None])
        tl.store(entry + 3, tl.broadcast_to(i, entry.shape), mask=i < n[:, None])


@triton.jit
def _write_my_tiles(
    tiles, first_row, rows, invalid,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write the tiles of this program's EXPERTS experts; return the experts, first and end rows.

    `rows` (BLOCK_E,) holds the rows of all experts, which follow each other from `first_row` on.
    """
    e = tl.arange(0, BLOCK_E)
    mine = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = e[None, :] < mine[:, None]
    row = first_row + tl.sum(tl.where(before, rows[None, :], 0), 1)
    tile = tl.sum(tl.where(before, ((rows + BLOCK_M - 1) // BLOCK_M)[None, :], 0), 1)
    end = row + tl.sum(tl.where(e[None, :] == mine[:, None], rows[None, :], 0), 1)
    _write_tiles(tiles, rows, invalid, mine, row, end, tile, BLOCK_M, 32)
    return mine, row, end


@triton.jit(do_not_specialize=["rows"])
def tiles_kernel(
    offsets, expert_start, tiles, rows, num_experts,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """expert_start (E+1,) and the tile table from offsets (E+1,).

    If the offsets do not ascend within [0, rows], the table is marked as invalid and no expert has
    a row: nothing is read out of bounds.

    Grid: E/EXPERTS; a program owns the entries of EXPERTS experts.
    """
    e = tl.arange(0, BLOCK_E)
    known = e < num_experts
    start = tl.load(offsets + e, mask=known, other=0).to(tl.int64)
    end = tl.load(offsets + e + 1, mask=known, other=0).to(tl.int64)
    outside = known & ((start < 0) | (end < start) | (end > rows))
    invalid = tl.max(outside.to(tl.int32), 0)
    first_row = tl.where(invalid > 0, 0, tl.load(offsets)).to(tl.int32)
    count = tl.where(invalid > 0, 0, end - start).to(tl.int32)
    mine, _, last = _write_my_tiles(tiles, first_row, count, invalid, BLOCK_M, BLOCK_E, EXPERTS)
    _write_expert_start(expert_start, first_row, mine, last, num_experts)


@triton.jit
def _write_expert_start(expert_start, first_row, mine, end, num_experts):
    """Write the end rows of experts `mine`; the first program also writes the first row."""
    tl.store(expert_start + mine + 1, end, mask=mine < num_experts)
    if tl.program_id(0) == 0:
        tl.store(expert_start, first_row)


@triton.jit(do_not_specialize=["chunks"])
def scan_kernel(
    counts, totals, expert_start, tiles, chunks, num_experts,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """counts[p, e] becomes the offset from a slot's position in its sorted chunk to its row.

    That is the first row of chunk p's slots of expert e, minus the position of the first of them.

    Grid: E/EXPERTS; a program owns EXPERTS columns and their entries of expert_start and of the
    tile table.
    """
    e = tl.arange(0, BLOCK_E)
    rows = tl.load(totals + e, mask=e < num_experts, other=0)
    mine, row, end = _write_my_tiles(tiles, 0, rows, 0, BLOCK_M, BLOCK_E, EXPERTS)
    _write_expert_start(expert_start, 0, mine, end, num_experts)
    for first in tl.range(0, chunks, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        ok = (p < chunks)[:, None] & (mine < num_experts)[None, :]
        at = counts + p.to(tl.int64)[:, None] * num_experts + mine[None, :]
        both = tl.load(at, mask=ok, other=0)
        count = both & _LOWER
        tl.store(at, row[None, :] + tl.cumsum(count, 0) - count - (both >> _SHIFT), mask=ok)
        row += tl.sum(count, 0)


@triton.jit
def _sorted_chunk(ids, p, slots, num_experts, CHUNK: tl.constexpr):
    """Experts and slots of chunk p, sorted by expert and, within an expert, by slot."""
    i = tl.arange(0, CHUNK)
    slot = p * CHUNK + i
    tagged = _load_ids(ids, slot, slot < slots, num_experts) << _SHIFT
    tagged = tl.sort(tagged | i)
    return tagged >> _SHIFT, p * CHUNK + (tagged & _LOWER)


@triton.jit
def _write_maps(slot_token, row_token, row_slot, slot_row, slot, row, here, slots, slots_per_token):
    """Write the maps between slots and rows; a slot that is not `here` has no row, −1."""
    if slot_token is None:
        token = slot // slots_per_token
    else:
        token = tl.load(slot_token + slot, mask=here, other=0).to(tl.int32)
    tl.store(row_token + row, token, mask=here)
    tl.store(row_slot + row, slot, mask=here)
    tl.store(slot_row + slot, tl.where(here, row, -1), mask=slot < slots)


@triton.jit(do_not_specialize=["slots"])
def place_kernel(
    ids, slot_token, to_row, row_token, row_slot, slot_row, slots, num_experts, slots_per_token,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The maps row_token, row_slot and slot_row.

    Each chunk is sorted: comparing all its pairs instead took 255 registers and 71 µs for 196608
    slots.

    Grid: chunks; a program owns the slots of its chunk.
    """
    p = tl.program_id(0)
    expert, slot = _sorted_chunk(ids, p, slots, num_experts, CHUNK)
    here = expert < num_experts
    i = tl.arange(0, CHUNK)
    row = i + tl.load(to_row + p.to(tl.int64) * num_experts + expert, mask=here, other=0)
    _write_maps(slot_token, row_token, row_slot, slot_row, slot, row, here, slots, slots_per_token)


@triton.jit(do_not_specialize=["slots"])
def one_chunk_kernel(
    ids, slot_token, row_token, row_slot, slot_row, expert_start, tiles, totals,
    slots, num_experts, slots_per_token,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The whole permutation of at most CHUNK slots: sorted slots are the rows. Grid: 1."""
    row = tl.arange(0, CHUNK)
    expert, slot = _sorted_chunk(ids, 0, slots, num_experts, CHUNK)
    here = expert < num_experts
    _write_maps(slot_token, row_token, row_slot, slot_row, slot, row, here, slots, slots_per_token)
    e = tl.arange(0, BLOCK_E)
    rows = tl.histogram(expert, BLOCK_E, mask=here)
    end = tl.cumsum(rows, 0)
    count = (rows + BLOCK_M - 1) // BLOCK_M
    tl.store(totals + e, rows, mask=e < num_experts)
    tl.store(expert_start, 0)
    tl.store(expert_start + e + 1, end, mask=e < num_experts)
    _write_tiles(tiles, rows, 0, e, end - rows, end, tl.cumsum(count, 0) - count, BLOCK_M, 1)
