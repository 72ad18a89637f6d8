"""The one place that allocates buffers for kernels, so that tests can poison every one of them."""

from collections.abc import Sequence

import torch


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def empty_like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """With the strides of `t`, which is dense."""
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device)
