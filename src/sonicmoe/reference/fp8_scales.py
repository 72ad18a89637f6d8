"""The scales of dZ, dZᵀ and A'ᵀ.

dZ is rounded before the largest value of its row or column is known, so its scales come from
bounds. |dA'ᵢ| ≤ ‖dO‖·‖W2ᵢ‖ for column i of W2 (Cauchy–Schwarz), times the score and the slope of
the activation, which follows from the largest |Z|: of 128 columns of the row for dX, of the column
over all rows of the expert for dW1. A has an exact maximum for each row, and a bound for each block
of an expert's columns, which keeps one outlier from making the other blocks subnormal. A row's
scale depends on that row and the weights alone, so dX
is independent of the batch.
"""

import math
from functools import cache
from typing import NamedTuple

import torch

from ..enums import ActivationType, SoftCaps
from ..shapes import BLOCK
from ..tensors import E4M3_MAX, DzScales, Permutation
from .grouped_gemm import row_slots

LARGEST_SLOPE = 1.13  # of the activations (GELU)
SLACK = 1.15  # covers it, and rounding in fp32 and bf16
MIN_SCALE = 2.0**-126


def blocks(value: torch.Tensor) -> torch.Tensor:
    """(R, C) as (R, J, 128), padded with zeros."""
    return torch.nn.functional.pad(value, (0, -value.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def z_columns(value: torch.Tensor, activation: ActivationType, gate_up: str) -> torch.Tensor:
    """(R, I) as (R, N): gate and up have the value of their column of A."""
    if not activation.is_gated:
        return value
    return value.repeat_interleave(2, 1) if gate_up == "interleaved" else value.repeat(1, 2)


class Slope(NamedTuple):
    """|∂A/∂Z| ≤ factor · min(|Z|, limit) + offset, up to LARGEST_SLOPE."""

    factor: float = 1.0
    offset: float = 0.0
    limit: float = math.inf

    def bound(self, zmax: torch.Tensor) -> torch.Tensor:
        return self.factor * zmax.clamp(max=self.limit) + self.offset

    def value_bound(self, zmax: torch.Tensor) -> torch.Tensor:
        """A bound on |A|."""
        return self.bound(zmax) * zmax.clamp(max=self.limit)


def slope_of(activation: ActivationType) -> Slope | None:
    """None where 1 bounds the slope, as of SiLU."""
    if activation.clamp:
        limit, alpha, offset = activation.clamp
        # The gate is clamped from above; below zero |gate·σ(α·gate)| is at most 0.28/α.
        bounded = alpha > 0 and limit >= 0.28 / alpha
        return Slope(offset=abs(offset), limit=limit if bounded else math.inf)
    if activation.soft_caps:
        return _of_soft_caps(activation.soft_caps)
    if activation is ActivationType.RELU_SQ:
        return Slope(factor=2.0)
    return Slope() if activation.is_gated else None


@cache
def _of_soft_caps(caps: SoftCaps) -> Slope:
    """∂A/∂up is G = cap(gate)·σ(gate), ∂A/∂gate is G' times cap(up), and A is G·cap(up).

    Of G/gate and G' the largest on a grid. With a factor of one Inkling 2's scales would be 1.2
    times larger, and an outlier would make more of the rest subnormal.
    """
    share = slope = 0.0
    for i in range(-4096, 4096):
        gate = min(1.0, caps.gate) * (i + 0.5) / 64
        t, sigmoid = math.tanh(gate / caps.gate), 1 / (1 + math.exp(-gate))
        value = caps.gate * t * sigmoid
        share = max(share, value / gate)
        slope = max(slope, abs(sigmoid * (1 - t * t) + value * (1 - sigmoid)))
    factor = max(share, slope / LARGEST_SLOPE)
    return Slope(factor, limit=max(caps.up, caps.gate / factor))


def row_experts(p: Permutation, rows: int) -> torch.Tensor:
    """The expert of each row; E past the last expert."""
    every = torch.arange(rows, device=p.expert_start.device)
    return torch.searchsorted(p.expert_start[1:].long(), every, right=True)


def scale_to_max(bound: torch.Tensor) -> torch.Tensor:
    """The scale that takes `bound` to 448; NaN unless finite.

    No power of two: a bound is looser than a maximum and cannot afford up to a factor of 2 more.
    """
    scale = (bound * (1 / E4M3_MAX)).clamp(min=MIN_SCALE)
    return torch.where(bound.isfinite(), scale, math.nan)


def dz_scales(scores, do_scale, do_norm, kept, w, p, activation, gate_up, columns):
    """A `DzScales`. `kept` is a `Kept`, `w` is W2; columns only if `columns`.

    Rows past the last expert have factors of zero.
    """
    _, zmax, zmax_columns, a_scale, x_scale = kept
    rows, experts = zmax.shape[1], w.w_scale.shape[0]
    expert = row_experts(p, rows)
    used, e = expert < experts, expert.clamp(max=experts - 1)
    token = torch.arange(rows, device=zmax.device) if p.row_token is None else p.row_token.long()
    token = token.where(used, 0)
    s = torch.ones(rows, device=zmax.device)
    if scores is not None:
        slots = row_slots(p, slice(None))
        s = scores.flatten()[slots.where(used, 0) if p.row_slot is not None else slots].float()
    slope = slope_of(activation)
    of_block = blocks(w.w_norm).amax(-1)[e].T  # (J, R)
    if slope is not None:
        of_block = of_block * slope.bound(zmax)
    do_norm = SLACK * do_norm[token] * s.abs()
    do_row = do_scale[token] * s.abs()
    dz_scale = scale_to_max(do_norm * of_block.amax(0))
    factors = torch.stack([
        do_scale[token] * w.w_scale[e], s, 1 / dz_scale, x_scale[token], s * do_scale[token]
    ])  # fmt: skip
    factors = torch.where(used, factors, 0.0)
    if not columns:
        return DzScales(factors, None, None, dz_scale, None, None)

    def largest(values: torch.Tensor) -> torch.Tensor:
        """Of the rows of each expert: (E, 1)."""
        values = torch.where(used, values, 0.0)
        zeros = torch.zeros(experts, device=values.device)
        return zeros.scatter_reduce_(0, e, values, "amax")[:, None]

    of_dz = largest(do_norm * x_scale[token]) * w.w_norm
    of_a = zmax_columns
    if slope is not None:
        of_dz = of_dz * slope.bound(zmax_columns)
        of_a = slope.value_bound(zmax_columns)
    of_a = largest(do_row) * blocks(of_a).amax(-1)
    of_a = torch.minimum(of_a, largest(do_row * (E4M3_MAX * a_scale.amax(0))))
    dz_t_scale, a_t_scale = scale_to_max(of_dz), scale_to_max(of_a)
    factors_t = (1 / dz_t_scale, 1 / a_t_scale)
    dz_t_scale = z_columns(dz_t_scale, activation, gate_up)
    a_t_scale = a_t_scale.repeat_interleave(BLOCK, 1)[:, : zmax_columns.shape[1]].contiguous()
    return DzScales(factors, *factors_t, dz_scale, dz_t_scale, a_t_scale)
