"""The one place that allocates buffers, so that tests can poison every one of them."""

from collections.abc import Sequence
from typing import Any

import torch

from .here import here

# (shape, strides, dtype), all but tuples refused; None in a PyTorch that has no such function.
on_current_gpu: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For kernels to fill: on a GPU, or where they are interpreted or only compiled."""
    shape = tuple(shape)
    if len(shape) <= 2 and _is_current_gpu(device):
        return _noted(shape, (*shape[1:], 1)[: len(shape)], dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def empty_like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """With the strides of `t`, which is dense."""
    if _is_current_gpu(t.device):
        return _noted(tuple(t.shape), t.stride(), dtype)
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device)


def _noted(*how: Any) -> torch.Tensor:
    t = on_current_gpu(*how)
    if here.recording is not None:
        here.recording.allocated(t)
    return t


def _is_current_gpu(device: torch.device) -> bool:
    """Whose memory comes without the dispatcher, as in the code that Inductor writes: a step
    allocates some twenty buffers."""
    return (
        on_current_gpu is not None
        and device.index is not None  # a GPU's alone has one
        and device.index == torch._C._cuda_getDevice()
    )
