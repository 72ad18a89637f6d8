"""The operator that decodes packed weights where no grouped GEMM does it."""

import torch
from torch import Tensor

from ..reference import packed as reference
from ..tensors import Packed
from .registry import operator


@operator(reference, "packed")
def dequantize_weight(
    packed: Packed, first: int, count: int, dtype: torch.dtype, backend: str
) -> Tensor:
    """(count, N, K): the experts from `first` on, rounded once, in the stored order."""
    out = packed.codes.new_empty(count, packed.stored_rows, packed.stored_columns, dtype=dtype)
    return out.mT if packed.is_transposed else out
