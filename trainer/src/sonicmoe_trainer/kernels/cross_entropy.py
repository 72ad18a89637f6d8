"""Cross-entropy of logits, whose gradient replaces them."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def cross_entropy_kernel(
    logits, targets, losses, rows, stride,
    V: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """losses[row] = logsumexp(logits[row]) − logits[row, target]; with GRADIENT, logits (rows, V)
    become softmax(logits) − onehot(target), rounded to their dtype.

    Grid: (rows,); a program owns one row. In fp32.
    """
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(line + start + column, mask=start + column < V, other=float("-inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(peak, x)
        # Lanes past the last column of a short row have seen no number yet.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - base) + tl.exp(x - base)
        peak = higher
    highest = tl.max(peak, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(peak - highest), 0))
    target = tl.load(targets + row)
    tl.store(losses + row, lse - tl.load(line + target).to(tl.float32))
    if GRADIENT:
        tl.debug_barrier()  # the logit of the target has been read
        for start in range(0, V, BLOCK):
            inside = start + column < V
            x = tl.load(line + start + column, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.exp(x - lse) - (start + column == target).to(tl.float32)
            tl.store(line + start + column, gradient.to(logits.dtype.element_ty), mask=inside)
