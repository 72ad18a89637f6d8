"""The permutation as a counting sort without floating point, sorting network or host.

Slots are cut into spans. `count_kernel` counts each span's experts, `scan_kernel` turns the counts
into the row at which each span's slots of an expert begin, `place_kernel` gives every slot its row.
Within an expert rows keep the order of their slots, so the result is the same every time.
"""

import triton
import triton.language as tl


@triton.jit
def _load_ids(ids, slot, inside, num_experts):
    """Expert of each slot, and whether it is one of ours."""
    expert = tl.load(ids + slot, mask=inside, other=-1).to(tl.int64)
    here = (expert >= 0) & (expert < num_experts)
    return tl.where(here, expert, 0).to(tl.int32), here


@triton.jit(do_not_specialize=["slots", "span"])
def count_kernel(
    ids, counts, totals, slots, span, num_experts, BE: tl.constexpr, CHUNK: tl.constexpr
):
    """counts[p, e] = slots of span p with expert e, added up in totals. Grid: spans."""
    p = tl.program_id(0)
    histogram = tl.zeros((BE,), tl.int32)
    end = tl.minimum((p + 1) * span, slots)
    for first in tl.range(p * span, end, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        expert, here = _load_ids(ids, slot, slot < end, num_experts)
        histogram += tl.histogram(expert, BE, mask=here)
    e = tl.arange(0, BE)
    tl.store(counts + p.to(tl.int64) * num_experts + e, histogram, mask=e < num_experts)
    tl.atomic_add(totals + e, histogram, mask=histogram > 0, sem="relaxed")


@triton.jit
def _write_tiles(tiles, start, rows, num_experts, HEIGHT: tl.constexpr, BE: tl.constexpr):
    """The tile table, given (BE,) first row and rows of each expert; programs share the experts."""
    e = tl.arange(0, BE)
    count = (rows + HEIGHT - 1) // HEIGHT
    tile_start = tl.cumsum(count, 0) - count
    p = tl.program_id(0)
    if p == 0:
        tl.store(tiles, tl.sum(count, 0))
        tl.store(tiles + 1, 0)
        tl.store(tiles + 2, 0)
    for expert in tl.range(p, num_experts, tl.num_programs(0)):
        mine = e == expert
        n = tl.sum(tl.where(mine, count, 0), 0)
        tile = tl.sum(tl.where(mine, tile_start, 0), 0)
        row = tl.sum(tl.where(mine, start, 0), 0)
        end = row + tl.sum(tl.where(mine, rows, 0), 0)
        for i0 in tl.range(0, n, 64):
            i = i0 + tl.arange(0, 64)
            entry = tiles + 3 * (1 + tile + i)
            tl.store(entry, expert, mask=i < n)
            tl.store(entry + 1, row + i * HEIGHT, mask=i < n)
            tl.store(entry + 2, end, mask=i < n)


@triton.jit
def tiles_kernel(expert_start, tiles, num_experts, HEIGHT: tl.constexpr, BE: tl.constexpr):
    """The tile table from expert_start. Grid: any number; a program owns every n-th expert."""
    e = tl.arange(0, BE)
    start = tl.load(expert_start + e, mask=e < num_experts, other=0)
    end = tl.load(expert_start + e + 1, mask=e < num_experts, other=0)
    _write_tiles(tiles, start, end - start, num_experts, HEIGHT, BE)


@triton.jit(do_not_specialize=["spans"])
def scan_kernel(
    counts, totals, expert_start, tiles, spans, num_experts,
    HEIGHT: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """counts[p, e] becomes the first row of span p's slots of e. Grid: E/EXPERTS.

    A program owns EXPERTS columns, their entries of expert_start and a share of the tile table.
    """
    e = tl.arange(0, BE)
    total = tl.load(totals + e, mask=e < num_experts, other=0)
    end_row = tl.cumsum(total, 0)
    _write_tiles(tiles, end_row - total, total, num_experts, HEIGHT, BE)

    mine = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = e[None, :] < mine[:, None]
    row = tl.sum(tl.where(before, total[None, :], 0), 1)
    own = tl.load(totals + mine, mask=mine < num_experts, other=0)
    tl.store(expert_start + mine + 1, row + own, mask=mine < num_experts)
    if tl.program_id(0) == 0:
        tl.store(expert_start, 0)
    for first in tl.range(0, spans, BP):
        p = first + tl.arange(0, BP)
        ok = (p < spans)[:, None] & (mine < num_experts)[None, :]
        at = counts + p.to(tl.int64)[:, None] * num_experts + mine[None, :]
        count = tl.load(at, mask=ok, other=0)
        tl.store(at, row[None, :] + tl.cumsum(count, 0) - count, mask=ok)
        row += tl.sum(count, 0)


@triton.jit(do_not_specialize=["slots", "span"])
def place_kernel(
    ids, slot_token, first_row, row_token, row_slot, slot_row,
    slots, span, num_experts, slots_per_token,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The maps between slots and rows. Grid: spans; a program owns the slots of its span."""
    p = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    start = p * span
    end = tl.minimum(start + span, slots)
    for first in tl.range(start, end, CHUNK):
        slot = first + i
        expert, here = _load_ids(ids, slot, slot < end, num_experts)
        tagged = tl.where(here, expert, -1)
        earlier = (tagged[:, None] == tagged[None, :]) & (i[None, :] < i[:, None])
        rank = tl.sum(earlier.to(tl.int32), 1)
        for passed in tl.range(start, first, CHUNK):
            other, there = _load_ids(ids, passed + i, passed + i < end, num_experts)
            same = (expert[:, None] == other[None, :]) & there[None, :]
            rank += tl.sum(same.to(tl.int32), 1)
        row = rank + tl.load(first_row + p.to(tl.int64) * num_experts + expert, mask=here, other=0)
        if slot_token is None:
            token = slot // slots_per_token
        else:
            token = tl.load(slot_token + slot, mask=slot < end, other=0).to(tl.int32)
        tl.store(row_token + row, token, mask=here)
        tl.store(row_slot + row, slot, mask=here)
        tl.store(slot_row + slot, tl.where(here, row, -1), mask=slot < end)
