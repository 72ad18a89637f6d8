"""Scaled transposition: PEFT stores the LoRA factors of all experts side by side."""

import triton
import triton.language as tl


@triton.jit
def transpose_kernel(source, out, scale, P, Q, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr):
    """out (Q, P) = scale · source (P, Q)ᵀ.

    Grid: (P/BLOCK_P, Q/BLOCK_Q); a program owns one tile of `out`.
    """
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    q = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = (p < P)[:, None] & (q < Q)[None, :]
    tile = tl.load(source + p.to(tl.int64)[:, None] * Q + q[None, :], mask=inside, other=0.0)
    tile = tl.trans(tile.to(tl.float32) * scale)
    ptr = out + q.to(tl.int64)[:, None] * P + p[None, :]
    tl.store(ptr, tile.to(out.dtype.element_ty), mask=tl.trans(inside))
