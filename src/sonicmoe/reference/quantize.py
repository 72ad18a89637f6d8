"""Quantization to e4m3. Every scale is a power of two, so that multiplying by it is exact."""

import ctypes
import math

import torch

from ..shapes import BLOCK, ceil_div

ROW_FLOOR = 1  # exponent of the smallest scale of a row or a weight: 2⁻¹²⁶
# Of a block of a row: 2⁻⁷⁰. The accumulator of `down` is multiplied by quotients of such scales.
BLOCK_FLOOR = 57


def power_of_two_scale(bound: torch.Tensor, floor: int = ROW_FLOOR) -> torch.Tensor:
    """The smallest power of two s ≥ 2^(floor − 127) with bound ≤ 448·s; NaN unless finite."""
    bits = bound.float().view(torch.int32)
    exponent = ((bits + 0x1FFFFF) >> 23) - 8  # 448 is 1.75·2⁸
    scale = (exponent.clamp(floor, 254) << 23).view(torch.float32)
    return torch.where(bound.isfinite(), scale, math.nan)


def to_e4m3(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float8_e4m3fn)


def norm_in_e4m3(value: torch.Tensor, dim: int) -> torch.Tensor:
    """A bound on the Euclidean norm of `to_e4m3(value)`, about 6% above that of `value`.

    Rounding adds at most 1/16 to a normal number and half a step, 2⁻¹⁰, to a subnormal one.
    """
    return value.square().sum(dim).sqrt() * (17 / 16) + 2.0**-10 * math.sqrt(value.shape[dim])


def quantize_rows(x, norms):
    """e4m3 (T, H), the scale (T,) of each row, and a bound on its Euclidean norm in e4m3 (T,) or
    None."""
    scale = power_of_two_scale(x.float().abs().amax(-1))
    scaled = x.float() / scale[:, None]
    return to_e4m3(scaled), scale, scale * norm_in_e4m3(scaled, 1) if norms else None


def quantize_weight(w, transposed, norms):
    """w8, w8_t, w_scale and w_norm of `Weight`; the second and the last only if they are asked
    for."""
    scale = power_of_two_scale(w.abs().amax((1, 2)).float())
    scaled = w.float() / scale[:, None, None]
    q = to_e4m3(scaled)
    norm = scale[:, None] * norm_in_e4m3(scaled, 1) if norms else None
    return q.contiguous(), q.mT.contiguous() if transposed else None, scale, norm


def quantize_again(w, scale):
    """w8 of a weight whose scales are known."""
    return to_e4m3(w.float() / scale[:, None, None]).contiguous()


def quantize_weight_into(w8, w8_t, w_scale, w_norm, w):
    found = quantize_weight(w, w8_t is not None, w_norm is not None)
    for buffer, values in zip((w8, w8_t, w_scale, w_norm), found, strict=True):
        if buffer is not None:
            buffer.copy_(values)


def checked_scales(weight1, q1, scale1, weight2, q2, scale2, sample, generation, flags):
    """The scales (E,) of two weights, NaN for experts whose q is not their weights in e4m3.

    All values are compared in every call.
    """
    sample.add_(1)
    checked1, stale1 = _compared(weight1, q1, scale1)
    checked2, stale2 = _compared(weight2, q2, scale2)
    at_address = (ctypes.c_int32 * 2).from_address(flags.item())
    raised = torch.frombuffer(at_address, dtype=torch.int32)
    before = raised.to(generation.device, non_blocking=True)
    raised.copy_(torch.where(torch.stack([stale1, stale2]), generation, before), non_blocking=True)
    return checked1, checked2


def _compared(w, q, scale):
    """The scales, NaN for experts that changed, and whether one did, or is finite again."""
    rounded = to_e4m3(w.float() / scale[:, None, None])
    is_same = (rounded.float() == q.float()).flatten(1).all(1)
    is_repaired = scale.isnan() & w.isfinite().flatten(1).all(1)
    is_stale = (~is_same & ~scale.isnan()) | is_repaired
    return torch.where(is_same, scale, math.nan), is_stale.any()


def quantize_blocks(z: torch.Tensor, concatenated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Z (R, N) in e4m3 and its scales (⌈N/128⌉, R), one for 128 columns of a row.

    If gate and up columns are concatenated, a block is 64 gates and the ups that belong to them.
    """
    rows, columns = z.shape
    block = _block_of_column(columns, concatenated, z.device)
    amax = z.new_zeros(rows, ceil_div(columns, BLOCK), dtype=torch.float32)
    amax.scatter_reduce_(1, block.expand(rows, -1), z.float().abs(), "amax")
    scale = power_of_two_scale(amax, BLOCK_FLOOR)
    return to_e4m3(z.float() / scale[:, block]), scale.mT.contiguous()


def dequantize_blocks(z8: torch.Tensor, scale: torch.Tensor, concatenated: bool) -> torch.Tensor:
    """The inverse of `quantize_blocks`, in fp32."""
    block = _block_of_column(z8.shape[1], concatenated, z8.device)
    return z8.float() * scale.mT[:, block]


def _block_of_column(columns: int, concatenated: bool, device: torch.device) -> torch.Tensor:
    column = torch.arange(columns, device=device)
    if concatenated:
        return column % (columns // 2) // (BLOCK // 2)
    return column // BLOCK
