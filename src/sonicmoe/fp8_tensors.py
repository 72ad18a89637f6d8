"""Tensors in e4m3 and their scales, as the operators of the experts in FP8 take them.

`reference.fp8` says what the scales are. None stands for what is not needed, or not kept.
"""

from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
Z_DTYPE = {"keep": torch.bfloat16, "fp8": E4M3}  # by `keep_z`, if Z is kept


class Fp8Weight(NamedTuple):
    """A weight (E, N, K), the same transposed (E, K, N), and its scales (E,).

    `w_norm` (E, K) bounds the Euclidean norms of the columns; the backward pass needs that of W2.
    """

    w8: torch.Tensor | None = None
    w8_t: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None
    w_norm: torch.Tensor | None = None

    @property
    def mT(self) -> "Fp8Weight":
        return Fp8Weight(self.w8_t, self.w8, self.w_scale)


class Fp8Kept(NamedTuple):
    """What dZ needs of the forward pass: Z in bf16 or e4m3 (R, N), the largest |Z| of blocks of
    a row (J, R) and of columns of an expert (E, I), and the scales of A and X."""

    z: torch.Tensor
    zmax: torch.Tensor
    zmax_columns: torch.Tensor
    a_scale: torch.Tensor
    x_scale: torch.Tensor


class DzScales(NamedTuple):
    """What the dZ GEMM multiplies by before it rounds, and the scales that undo it.

    row_factors (5, R): of the accumulator to dA', the score, and of rows of dZ, dZᵀ and A'ᵀ.
    column_factors (E, I): of columns of dZᵀ; gate and up have the same.
    block_factors (E, J): of blocks of 128 columns of A'ᵀ.
    """

    row_factors: torch.Tensor
    column_factors: torch.Tensor | None
    block_factors: torch.Tensor | None
    dz_scale: torch.Tensor
    dz_t_scale: torch.Tensor | None
    a_t_scale: torch.Tensor | None


class Fp8Dz(NamedTuple):
    """dZ (R, N) with its scales (R,) for dX; dZᵀ (N, P) with its scales (E, N) for dW1."""

    dz8: torch.Tensor | None
    dz_scale: torch.Tensor | None
    dz_t: torch.Tensor | None
    dz_t_scale: torch.Tensor | None
