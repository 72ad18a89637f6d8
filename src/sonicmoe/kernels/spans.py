"""Split-K for weight gradients: the rows of a long expert are split into spans.

Without it the few programs that own a long expert's tiles would run long after all others. The rows
of an expert with at least two spans are split: each span is summed on its own, in fp32, and
`sum_spans_kernel` adds the spans in order.

Each span has a place of its own in the buffer of partial sums. An expert of n spans that starts in
row s owns places s // span to s // span + n - 1. Its last span has the remaining rows too.
"""

import triton
import triton.language as tl


@triton.jit
def _expert_of(row, expert_start, num_experts):
    """The last expert that starts at `row` or before."""
    low = 0
    high = num_experts
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(expert_start + middle) <= row:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _spans_at(place, expert_start, num_experts, span):
    """The expert that owns `place`, its first and end row, and its number of spans; zero spans if
    nobody owns the place."""
    row = (place + 1) * span - 1
    expert = _expert_of(row, expert_start, num_experts)
    start = tl.load(expert_start + expert)
    end = tl.load(expert_start + expert + 1)
    spans = (end - start) // span
    taken = (spans >= 2) & (row >= start) & (row < end) & (place < start // span + spans)
    return expert, start, end, tl.where(taken, spans, 0)


@triton.jit
def rows_of(group, start, end, expert_start, num_experts, span):
    """The expert of a group, first and end row that it sums over; -1 and -1 if there are none.

    Group e < E is a whole expert, with rows from `start` to `end`; group E + c is the span in
    place c.
    """
    expert = group
    if group < num_experts:
        whole = end - start < 2 * span
        start = tl.where(whole, start, -1)
        end = tl.where(whole, end, -1)
    else:
        place = group - num_experts
        expert, first, last, spans = _spans_at(place, expert_start, num_experts, span)
        i = place - first // span
        start = tl.where(spans > 0, first + i * span, -1)
        end = tl.where(spans > 0, tl.where(i == spans - 1, last, first + (i + 1) * span), -1)
    return expert, start, end


@triton.jit
def any_is_split(tiles, span):
    """Whether the longest expert, whose rows the tile table's header holds, has two spans."""
    return tl.load(tiles + 1) >= 2 * span


@triton.jit(do_not_specialize=["span", "places"])
def sum_spans_kernel(
    partial, out, expert_start, tiles, num_experts, span, places,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ of the spans of e, in order, for every expert with at least two; added if ADD.

    Grid: any number of programs; each owns the blocks of `out` that it writes.
    """
    if not any_is_split(tiles, span):
        return
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    for t in tl.range(tl.program_id(0), places * blocks, tl.num_programs(0)):
        place = t // blocks
        expert, start, _, spans = _spans_at(place, expert_start, num_experts, span)
        if (spans > 0) & (place == start // span):
            i = t % blocks * BLOCK + tl.arange(0, BLOCK)
            ok = i < SIZE
            acc = tl.zeros((BLOCK,), tl.float32)
            for j in tl.range(0, spans):
                acc += tl.load(partial + (place + j).to(tl.int64) * SIZE + i, mask=ok, other=0.0)
            ptr = out + expert.to(tl.int64) * SIZE + i
            if ADD:
                acc += tl.load(ptr, mask=ok, other=0.0)
            tl.store(ptr, acc.to(out.dtype.element_ty), mask=ok)
