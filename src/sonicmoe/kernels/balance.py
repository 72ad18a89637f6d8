"""The auxiliary loss of a router, in fp32: one pass over the logits forward, one backward.

With p the softmax of each row of the logits (T, E) and s = Σ_t p, the loss is

    balance · E · ⟨s / Σs, c / Σc⟩ + z · mean(logsumexp²)

with c the number of rows of each expert. It is linear in s / Σs, so dL/ds (E,) is known together
with the loss, and the backward pass needs only that and the logits.
"""

import triton
import triton.language as tl

_LEAST: tl.constexpr = tl.constexpr(1e-12)  # lower bound of a divisor


@triton.jit
def _softmax(logits, token, ok, stride, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """p (BLOCK_T, BLOCK_E), zero past the last expert, and the logsumexp of each row."""
    e = tl.arange(0, BLOCK_E)
    ptr = logits + token.to(tl.int64)[:, None] * stride + e[None, :]
    row = tl.load(ptr, mask=ok[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)
    row = tl.where((e < E)[None, :], row, float("-inf"))
    peak = tl.max(row, 1)
    weight = tl.exp(row - peak[:, None])
    total = tl.sum(weight, 1)
    return weight / total[:, None], peak + tl.log(total)


@triton.jit(do_not_specialize=["tokens", "each"])
def softmax_sums_kernel(
    logits, sums, squares, tokens, each, stride,
    E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """sums[program] (E,) = Σ p and squares[program] = Σ logsumexp² over `each` tokens.

    Grid: T/each; a program owns its row of `sums` and its element of `squares`.
    """
    program = tl.program_id(0)
    first = program * each
    end = tl.minimum(first + each, tokens)
    share = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    square = tl.zeros((BLOCK_T,), tl.float32)
    for t in tl.range(first, end, BLOCK_T):
        token = t + tl.arange(0, BLOCK_T)
        ok = token < end
        p, lse = _softmax(logits, token, ok, stride, E, BLOCK_E)
        share += tl.where(ok[:, None], p, 0.0)
        square += tl.where(ok, lse * lse, 0.0)
    e = tl.arange(0, BLOCK_E)
    tl.store(sums + program * E + e, tl.sum(share, 0), mask=e < E)
    tl.store(squares + program, tl.sum(square, 0))


@triton.jit(do_not_specialize=["programs", "tokens"])
def balance_kernel(
    sums, squares, counts, loss, slope, balance, z, programs, tokens,
    E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The loss, and slope[e] = dL/ds_e, from the sums of `softmax_sums_kernel`. Grid: 1."""
    e = tl.arange(0, BLOCK_E)
    share = tl.zeros((BLOCK_P, BLOCK_E), tl.float32)
    square = tl.zeros((BLOCK_P,), tl.float32)
    for first in tl.range(0, programs, BLOCK_P):
        program = first + tl.arange(0, BLOCK_P)
        ok = program < programs
        ptr = sums + program[:, None] * E + e[None, :]
        share += tl.load(ptr, mask=ok[:, None] & (e < E)[None, :], other=0.0)
        square += tl.load(squares + program, mask=ok, other=0.0)
    total = tl.sum(share, 0)
    norm = tl.maximum(tl.sum(total, 0), _LEAST)
    if counts is None:
        rows = tl.zeros((BLOCK_E,), tl.float32)
    else:
        rows = tl.load(counts + e, mask=e < E, other=0).to(tl.float32)
        rows /= tl.maximum(tl.sum(rows, 0), _LEAST)
    inner = tl.sum(total / norm * rows, 0)
    mean = tl.sum(square, 0) / tl.maximum(tokens, 1)
    tl.store(loss, balance * E * inner + z * mean)
    tl.store(slope + e, balance * E * (rows - inner) / norm, mask=e < E)


@triton.jit(do_not_specialize=["tokens"])
def balance_backward_kernel(
    dloss, slope, logits, dlogits, z, tokens, stride,
    E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dlogits = dL · p · (slope − ⟨p, slope⟩ + 2 z/T · logsumexp).

    Grid: T/BLOCK_T; a program owns BLOCK_T tokens.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = token < tokens
    e = tl.arange(0, BLOCK_E)
    p, lse = _softmax(logits, token, ok, stride, E, BLOCK_E)
    s = tl.load(slope + e, mask=e < E, other=0.0)
    inner = tl.sum(p * s[None, :], 1)
    value = p * (s[None, :] - inner[:, None] + (2 * z / tokens * lse)[:, None])
    out = dlogits + token.to(tl.int64)[:, None] * E + e[None, :]
    value *= tl.load(dloss).to(tl.float32)
    tl.store(out, value.to(dlogits.dtype.element_ty), mask=ok[:, None] & (e < E)[None, :])
