"""The one place that allocates buffers, so that tests can poison every one of them."""

from collections.abc import Sequence

import torch


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def empty_like(t: torch.Tensor) -> torch.Tensor:
    """Uninitialised, with the strides of `t` where `t` is dense."""
    return torch.empty_like(t)


def absent(like: torch.Tensor) -> torch.Tensor:
    """What an operator returns in the place of a result that nobody asked for."""
    return like.new_empty(0)
