"""The permutation as a counting sort without floating point, sorting network or host.

Slots are cut into as many spans as there are programs. `count_kernel` counts each span's experts;
`place_kernel` adds up the counts of the spans before its own and gives every slot its row. Within
an expert rows keep the order of their slots, so the result is the same every time.
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
def count_kernel(ids, counts, slots, span, num_experts, BE: tl.constexpr, CHUNK: tl.constexpr):
    """counts[p, e] = slots of span p with expert e. Grid: spans; a program owns one row."""
    p = tl.program_id(0)
    histogram = tl.zeros((BE,), tl.int32)
    end = tl.minimum((p + 1) * span, slots)
    for first in tl.range(p * span, end, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        expert, here = _load_ids(ids, slot, slot < end, num_experts)
        histogram += tl.histogram(expert, BE, mask=here)
    e = tl.arange(0, BE)
    tl.store(counts + p * num_experts + e, histogram, mask=e < num_experts)


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
    for expert in tl.range(p, num_experts, tl.num_programs(0)):
        mine = e == expert
        n = tl.sum(tl.where(mine, count, 0), 0)
        tile = tl.sum(tl.where(mine, tile_start, 0), 0)
        row = tl.sum(tl.where(mine, start, 0), 0)
        for i0 in tl.range(0, n, 64):
            i = i0 + tl.arange(0, 64)
            entry = tiles + 2 * (1 + tile + i)
            tl.store(entry, expert, mask=i < n)
            tl.store(entry + 1, row + i * HEIGHT, mask=i < n)


@triton.jit
def tiles_kernel(expert_start, tiles, num_experts, HEIGHT: tl.constexpr, BE: tl.constexpr):
    """The tile table from expert_start. Grid: any number of programs; each owns every n-th expert."""
    e = tl.arange(0, BE)
    start = tl.load(expert_start + e, mask=e < num_experts, other=0)
    end = tl.load(expert_start + e + 1, mask=e < num_experts, other=0)
    _write_tiles(tiles, start, end - start, num_experts, HEIGHT, BE)


@triton.jit(do_not_specialize=["slots", "span", "spans"])
def place_kernel(
    ids, slot_token, counts, next_row, row_token, row_slot, slot_row, expert_start, tiles,
    slots, span, spans, num_experts, slots_per_token,
    HEIGHT: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Every map of the permutation. Grid: spans; a program owns the slots of its span.

    next_row[p, e] is scratch: the row that the next slot of span p with expert e gets.
    """
    p = tl.program_id(0)
    e = tl.arange(0, BE)
    total = tl.zeros((BE,), tl.int32)
    before = tl.zeros((BE,), tl.int32)
    for q0 in tl.range(0, spans, BP):
        q = q0 + tl.arange(0, BP)
        ok = (q < spans)[:, None] & (e < num_experts)[None, :]
        block = tl.load(counts + q[:, None] * num_experts + e[None, :], mask=ok, other=0)
        total += tl.sum(block, 0)
        before += tl.sum(tl.where((q < p)[:, None], block, 0), 0)
    end_row = tl.cumsum(total, 0)
    if p == 0:
        tl.store(expert_start, 0)
        tl.store(expert_start + 1 + e, end_row, mask=e < num_experts)
    _write_tiles(tiles, end_row - total, total, num_experts, HEIGHT, BE)

    mine = next_row + p * num_experts
    base = end_row - total + before
    tl.store(mine + e, base, mask=e < num_experts)
    end = tl.minimum((p + 1) * span, slots)
    for first in tl.range(p * span, end, CHUNK):
        i = tl.arange(0, CHUNK)
        slot = first + i
        expert, here = _load_ids(ids, slot, slot < end, num_experts)
        tagged = tl.where(here, expert, -1)
        earlier = (tagged[:, None] == tagged[None, :]) & (i[None, :] < i[:, None])
        rank = tl.sum(earlier.to(tl.int32), 1)
        tl.debug_barrier()
        row = tl.load(mine + expert, mask=here, other=0) + rank
        if slot_token is None:
            token = slot // slots_per_token
        else:
            token = tl.load(slot_token + slot, mask=slot < end, other=0).to(tl.int32)
        tl.store(row_token + row, token, mask=here)
        tl.store(row_slot + row, slot, mask=here)
        tl.store(slot_row + slot, tl.where(here, row, -1), mask=slot < end)
        base += tl.histogram(expert, BE, mask=here)
        tl.debug_barrier()
        tl.store(mine + e, base, mask=e < num_experts)
