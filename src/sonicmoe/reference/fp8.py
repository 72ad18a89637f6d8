"""Z in e4m3 with power-of-two scales: exact to undo but for the rounding to e4m3 itself."""

import torch

from ..memory_policy import FP8_COLUMNS
from ..shapes import ceil_div


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """The least 2^e, normal in fp32, with amax ≤ 448·2^e; 448 = 1.75·2^8 is the largest e4m3."""
    exponent = ((amax.float().view(torch.int32) + 0x1FFFFF) >> 23) - 8
    return (exponent.clamp_min(1) << 23).view(torch.float32)


def quantize_blocks(z: torch.Tensor, concatenated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Z (R, N) in e4m3 and its scales (⌈N/128⌉, R) in fp32, one per row and block of 128 columns.

    If gate and up columns are concatenated, a block is 64 gates and the ups that belong to them.
    """
    rows, columns = z.shape
    block = _block_of_column(columns, concatenated, z.device)
    amax = z.new_zeros(rows, ceil_div(columns, FP8_COLUMNS), dtype=torch.float32)
    amax.scatter_reduce_(1, block.expand(rows, -1), z.float().abs(), "amax")
    scale = power_of_two_scale(amax)
    return (z.float() / scale[:, block]).to(torch.float8_e4m3fn), scale.mT.contiguous()


def dequantize_blocks(z8: torch.Tensor, scale: torch.Tensor, concatenated: bool) -> torch.Tensor:
    """The inverse of `quantize_blocks`, in fp32."""
    block = _block_of_column(z8.shape[1], concatenated, z8.device)
    return z8.float() * scale.mT[:, block]


def _block_of_column(columns: int, concatenated: bool, device: torch.device) -> torch.Tensor:
    column = torch.arange(columns, device=device)
    if concatenated:
        return column % (columns // 2) // (FP8_COLUMNS // 2)
    return column // FP8_COLUMNS
