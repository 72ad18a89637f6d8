"""Operators that decode packed weights, for the grouped GEMM that follows.

`dout` is not read: in a backward pass it tells a compiler so, which would else keep what the
forward pass decoded.
"""

import torch
from torch import Tensor

from ..reference import packed as reference
from ..tensors import E4M3, Packed
from .registry import operator


@operator(reference, "packed")
def dequantize_weight(
    dout: Tensor | None,
    packed: Packed,
    first: int,
    count: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """(count, N, K): the experts from `first` on, rounded once from fp32, in the stored order."""
    out = packed.codes.new_empty(count, packed.stored_rows, packed.stored_columns, dtype=dtype)
    return out.mT if packed.is_transposed else out


@operator(reference, "packed")
def quantize_packed(
    dout: Tensor | None,
    packed: Packed,
    first: int,
    count: int,
    transposed: bool,
    backend: str,
) -> Tensor:
    """w8 (count, N, K) of `Fp8Weight`, or w8_t (count, K, N) if `transposed`: what `quantize_weight`
    makes of the weight in bf16. Its scale is that of `packed`.
    """
    _, n, k = packed.shape
    return packed.codes.new_empty(count, *((k, n) if transposed else (n, k)), dtype=E4M3)
