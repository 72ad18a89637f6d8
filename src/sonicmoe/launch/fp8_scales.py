"""Launches of the kernels that compute the scales of dZ, dZᵀ and A'ᵀ."""

from functools import cache

import torch

from ..kernels.fp8_scales import column_scales_kernel, row_bounds_kernel
from ..reference.fp8_scales import MIN_SCALE, SLACK, Slope, slope_of
from ..shapes import BLOCK, ceil_div
from ..tensors import DzScales, Permutation
from . import memory
from .launcher import Bound, launch


@cache
def _kernels(inner: int, tile_m: int, gate_up: str | None, has_slope: bool) -> tuple[Bound, Bound]:
    options = {"I": inner, "BLOCK_M": tile_m, "BLOCK_I": BLOCK, "num_warps": 4}
    return (
        Bound(row_bounds_kernel, **options),
        Bound(column_scales_kernel, GATE_UP=gate_up, HAS_SLOPE=has_slope, **options),
    )


def dz_scales(scores, do_scale, do_norm, kept, w, p: Permutation, activation, gate_up, columns):
    """As `reference.fp8_scales.dz_scales`, but factors and scales of rows past the last expert are
    not written."""
    _, zmax, zmax_columns, a_scale, x_scale = kept
    rows, (experts, inner), device = zmax.shape[1], w.w_norm.shape, zmax.device
    gate_up = gate_up if activation.is_gated else None

    def new(*shape, dtype=torch.float32):
        return memory.empty(shape, dtype, device)

    scales = DzScales(new(5, rows), None, None, new(rows), None, None)
    blocks, slots, amax = ceil_div(inner, BLOCK), rows // p.tile_m + experts, None
    if columns:
        amax = new(3, slots, dtype=torch.int32)
        scales = scales._replace(
            column_factors=new(experts, inner),
            block_factors=new(experts, blocks),
            dz_t_scale=new(experts, kept.z.shape[1]),
            a_t_scale=new(experts, inner),
        )
    if rows == 0:
        for t in (scales.dz_t_scale, scales.a_t_scale):
            if t is not None:
                t.fill_(MIN_SCALE)
        return scales
    slope = slope_of(activation)
    of_rows, of_columns = _kernels(inner, p.tile_m, gate_up, slope is not None)
    numbers = slope or Slope()
    args: list = [do_scale, do_norm, x_scale, scores, p.row_token, p.row_slot]
    args += [zmax if slope else None, a_scale, w.w_scale, w.w_norm, p.tiles]
    args += [scales.row_factors, scales.dz_scale, amax, slots, SLACK, *numbers, rows]
    launch(of_rows, (p.tiles.shape[0] - 1,), *args)
    if columns:
        args = [amax, p.expert_start, zmax_columns, w.w_norm, scales.column_factors]
        args += [scales.block_factors, scales.dz_t_scale, scales.a_t_scale, *numbers, slots]
        launch(of_columns, (blocks, experts), *args)
    return scales
