"""Z in e4m3 with power-of-two scales, the format of `reference.quantize.quantize_blocks`."""

import triton
import triton.language as tl

from .quantize import BLOCK_FLOOR, scale_and_inverse


@triton.jit
def block_maxima(z, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest magnitudes (ROWS, COLUMNS/BLOCK) of each row's blocks of BLOCK columns."""
    return tl.max(tl.abs(tl.reshape(z, (ROWS, COLUMNS // BLOCK, BLOCK))), 2)


@triton.jit
def quantized(z, inverse, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """z times the inverse scales of its blocks, in e4m3."""
    blocks = tl.reshape(z, (ROWS, COLUMNS // BLOCK, BLOCK)) * inverse[:, :, None]
    return tl.reshape(blocks, (ROWS, COLUMNS)).to(tl.float8e4nv)


@triton.jit
def store_scales(z_scale, amax, rows, ok, first, num_rows, N: tl.constexpr, BLOCKS: tl.constexpr):
    """Store the scales of blocks `first`, `first` + 1, … of each row; return their inverses."""
    scale, inverse = scale_and_inverse(amax, BLOCK_FLOOR)
    block = first + tl.arange(0, BLOCKS)
    out = z_scale + block.to(tl.int64)[None, :] * num_rows + rows[:, None]
    tl.store(out, scale, mask=ok[:, None] & (block < (N + 127) // 128)[None, :])
    return inverse
