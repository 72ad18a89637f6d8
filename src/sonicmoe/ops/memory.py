"""The one place that allocates buffers, so that tests can poison every one of them."""

from collections.abc import Sequence

import torch

_empty_on_current_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For kernels to fill: on a GPU, or where they are interpreted or only compiled.

    A GPU's memory comes without the dispatcher, as in the code that Inductor writes: a step
    allocates some twenty buffers.
    """
    shape = tuple(shape)
    if (
        _empty_on_current_gpu
        and len(shape) <= 2
        and device.index is not None  # a GPU's alone has one
        and device.index == torch._C._cuda_getDevice()
    ):
        return _empty_on_current_gpu(shape, (*shape[1:], 1), dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def empty_like(t: torch.Tensor) -> torch.Tensor:
    """Uninitialised, with the strides of `t` where `t` is dense."""
    return torch.empty_like(t)


def absent(like: torch.Tensor) -> torch.Tensor:
    """What an operator returns in place of a result nobody asked for; fake if `like` is."""
    return like.new_empty(0)
