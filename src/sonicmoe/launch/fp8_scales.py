"""Launches of the kernels that compute the scales of dZ, dZᵀ and A'ᵀ."""

from functools import cache

import torch

from ..fp8_tensors import DzScales
from ..kernels.fp8_scales import column_scales_kernel, row_bounds_kernel
from ..memory_policy import FP8_COLUMNS
from ..permutation import Permutation
from ..reference.fp8_scales import MIN_SCALE, SLACK, Slope, slope_of
from ..shapes import ceil_div
from . import memory
from .launcher import Bound, launch

_COLUMNS = 256  # of a program of `column_scales_kernel`


@cache
def _kernels(inner: int, tile_m: int, gate_up: str | None, has_slope: bool) -> tuple[Bound, Bound]:
    options = {"I": inner, "BLOCK_M": tile_m, "num_warps": 4}
    of_columns = {"BLOCK_I": _COLUMNS, "GATE_UP": gate_up, "HAS_SLOPE": has_slope}
    return (
        Bound(row_bounds_kernel, BLOCK_I=FP8_COLUMNS, **options),
        Bound(column_scales_kernel, **of_columns, **options),
    )


def dz_scales(
    scores, do_scale, do_norm, kept, w, p: Permutation, activation, gate_up, columns
) -> DzScales:  # fmt: skip
    """As `reference.fp8_scales.dz_scales`, but factors and scales of rows past the last expert are
    not written."""
    _, zmax, zmax_columns, a_scale, x_scale = kept
    rows, (experts, inner), device = zmax.shape[1], w.w_norm.shape, zmax.device
    gate_up = gate_up if activation.is_gated else None

    def new(*shape, dtype=torch.float32):
        return memory.empty(shape, dtype, device)

    factors, dz_scale = new(5, rows), new(rows)
    of_columns = amax = column_factors = dz_t_scale = a_t_scale = None
    slots = rows // p.tile_m + experts
    if columns:
        column_factors = new(experts, 2, inner)
        dz_t_scale, a_t_scale = new(experts, kept.z.shape[1]), new(experts, inner)
        amax = new(3, slots, dtype=torch.int32)
    scales = DzScales(factors, column_factors, dz_scale, dz_t_scale, a_t_scale)
    if rows == 0:
        for t in (dz_t_scale, a_t_scale) if columns else ():
            t.fill_(MIN_SCALE)
        return scales
    slope = slope_of(activation)
    bounds, of_columns = _kernels(inner, p.tile_m, gate_up, slope is not None)
    numbers = slope or Slope()
    args = (do_scale, do_norm, x_scale, scores, p.row_token, p.row_slot)
    args += (zmax if slope else None, a_scale, w.w_scale, w.w_norm, p.tiles, factors, dz_scale)
    launch(bounds, (p.tiles.shape[0] - 1,), *args, amax, slots, SLACK, *numbers, rows)
    if columns:
        given = (amax, p.expert_start, zmax_columns, w.w_norm)
        grid = (ceil_div(inner, _COLUMNS), experts)
        launch(of_columns, grid, *given, column_factors, dz_t_scale, a_t_scale, *numbers, slots)
    return scales
