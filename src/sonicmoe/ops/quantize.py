"""Operators that quantize weights to FP8, and compare what is kept of them."""

import torch
from torch import Tensor

from ..tensors import E4M3, Weight
from .registry import Mutated, operator


@operator("weights")
def quantize_weight(
    w: Weight, transposed: bool, norms: bool, backend: str
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """w8, w8_t, w_scale and w_norm of `Weight`, from a parameter in bf16 or fp32.

    w8_t is None unless `transposed`, w_norm unless `norms`; w8 too of a packed weight.
    """
    (experts, n, k), of = w.shape, w.device
    w8 = w8_t = None
    if w.dense is not None:
        w8 = torch.empty(experts, n, k, dtype=E4M3, device=of)
        w8_t = torch.empty(experts, k, n, dtype=E4M3, device=of) if transposed else None
    w_norm = torch.empty(experts, k, device=of) if norms else None
    return w8, w8_t, torch.empty(experts, device=of), w_norm


@operator("quantize")
def quantize_weight_into(
    w8: Mutated,
    w8_t: Mutated | None,
    w_scale: Mutated,
    w_norm: Mutated | None,
    w: Tensor,
    backend: str,
) -> None:
    """`quantize_weight` of a parameter into these buffers."""


@operator("quantize")
def checked_scales(
    weight1: Tensor,
    q1: Tensor,
    scale1: Tensor,
    weight2: Tensor,
    q2: Tensor,
    scale2: Tensor,
    sample: Mutated,
    generation: Tensor,
    flags: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The scales (E,) of two weights, NaN for experts whose q is not their weights in e4m3.

    If there is such an expert, or one that was not finite when it was quantized and is now, the
    int32 `generation` (1,) is written to one of two int32 in host memory that the device can write,
    one for each weight. `flags` (1,) int64 is their address.

    Kernels compare one sample of an expert, at most 16384 values. `sample` (2, E) is the number of
    the next one, which they increment: consecutive samples cover all. It lies on the device, so
    that each replay of a graph compares another.
    """
    return torch.empty_like(scale1), torch.empty_like(scale2)
