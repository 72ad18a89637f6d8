"""The one place that allocates buffers for kernels, so that tests can poison every one of them."""

from collections.abc import Sequence

import torch


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not shape:
        return torch.empty((), dtype=dtype, device=device)
    # Sizes one by one: a tuple takes PyTorch's argument parser 1 µs longer, a torch.Size 2 µs.
    return torch.empty(*shape, dtype=dtype, device=device)


def empty_like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """With the strides of `t`, which is dense."""
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device)
