"""Tensors in e4m3 and their scales, as the operators of the experts in FP8 take them.

`reference.fp8` says what the scales are. None stands for what is not needed, or not kept.
"""

from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
Z_DTYPE = {"keep": torch.bfloat16, "fp8": E4M3}  # by `keep_z`, if Z is kept


class Fp8Weight(NamedTuple):
    """A weight (E, N, K), the same transposed (E, K, N), and its scales (E,)."""

    w8: torch.Tensor | None = None
    w8_t: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None

    @property
    def mT(self) -> "Fp8Weight":
        return Fp8Weight(self.w8_t, self.w8, self.w_scale)


class Fp8Kept(NamedTuple):
    """What dZ needs of the forward pass: Z in bf16 or e4m3 (R, N), zmax and scales of A and X."""

    z: torch.Tensor
    zmax: torch.Tensor
    a_scale: torch.Tensor
    x_scale: torch.Tensor


class Fp8Dz(NamedTuple):
    """dZ (R, N) with its scales (R,) for dX; dZᵀ (N, P) with its scales (E,) for dW1."""

    dz8: torch.Tensor | None
    dz_scale: torch.Tensor | None
    dz_t: torch.Tensor | None
    dz_t_scale: torch.Tensor | None
