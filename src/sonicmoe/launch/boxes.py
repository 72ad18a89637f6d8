"""Boxes of the operands of the Hopper kernels: what TMA loads and stores at once."""

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl

from ..tensors import Lora
from .descriptors import Boxes

_ROWS = 64  # rows of one consumer warpgroup
_GL_DTYPE = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}
UNBOUNDED = 0x7FFF0000
ORIGIN = 1 << 30


def laid_out(dtype: torch.dtype, shape, strides, block) -> Boxes:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _GL_DTYPE[dtype])
    return Boxes(dtype, shape, strides, block, layout)


@lru_cache(maxsize=1024)
def ragged_boxes(dtype, columns, strides, block) -> Boxes:
    shape = (UNBOUNDED, UNBOUNDED, ORIGIN, *columns)
    return laid_out(dtype, shape, (2**34 - strides[0], strides[0], *strides), (1, 1, *block))


@lru_cache(maxsize=1024)
def weight_boxes(dtype, shape, strides, n, k, gate_up=None) -> Boxes:
    """Boxes of (E, N, K) weights, which may lie in memory as (E, K, N)."""
    experts, columns, depth = shape
    e_stride, n_stride, k_stride = strides
    half = columns // 2
    if k_stride == 1 and gate_up != "concatenated":
        return laid_out(dtype, shape, strides, (1, n, k))
    if k_stride == 1:
        halves = (experts, 2, half, depth)
        return laid_out(dtype, halves, (e_stride, half * n_stride, n_stride, 1), (1, 2, n // 2, k))
    if gate_up != "concatenated":
        stored = (experts, depth, columns)
        return laid_out(dtype, stored, (e_stride, k_stride, 1), (1, k, n))
    halves = (experts, depth, 2, half)
    return laid_out(dtype, halves, (e_stride, k_stride, half, 1), (1, k, 1, n // 2))


def z_boxes(dtype, columns, width, gate_up) -> Boxes:
    """Boxes of Z and dZ with `width` columns, of one half if gate and up are concatenated."""
    if gate_up == "concatenated":
        half = columns // 2
        return ragged_boxes(dtype, (2, half), (columns, half, 1), (_ROWS, 1, width))
    return ragged_boxes(dtype, (columns,), (columns, 1), (_ROWS, width))


def row_boxes(t: torch.Tensor, *block: int) -> tuple[torch.Tensor, Boxes]:
    """Boxes of rows that end with their expert: see `kernels.hopper.ragged`."""
    return t, ragged_boxes(t.dtype, (t.shape[1],), t.stride(), block)


def low_rank(lora: Lora, layout: str, n: int, k: int, gate_up: str | None = None) -> tuple:
    """U and B as the kernels take them: B in the layout of the weights, and in their boxes of n
    columns."""
    u, b = lora
    if u is None or b is None:
        return lora
    b = b.contiguous() if layout == "nk" else b.mT.contiguous().mT
    return row_boxes(u, _ROWS, k), (b, weight_boxes(b.dtype, b.shape, b.stride(), n, k, gate_up))
