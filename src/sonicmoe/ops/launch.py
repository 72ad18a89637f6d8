"""What every launch needs: the device's facts, tensor descriptors, aligned operands."""

from functools import cache

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..tuning import Target

@cache
def _target_of(index: int) -> Target:
    major, minor = torch.cuda.get_device_capability(index)
    properties = torch.cuda.get_device_properties(index)
    return Target(10 * major + minor, properties.multi_processor_count)


def target_of(t: torch.Tensor) -> Target:
    """The device that a kernel on `t` runs on; the interpreter is a small Hopper without Gluon."""
    return Target(90, 4, gluon=False) if not t.is_cuda else _target_of(t.device.index)


def descriptor(t: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)


def aligned(t: torch.Tensor) -> torch.Tensor:
    """`t`, or a copy where it does not start on 16 bytes (a slice of a flat buffer may not)."""
    return t if t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.preserve_format)


def dot_precision(t: torch.Tensor) -> str:
    """IEEE for fp32, unless PyTorch was told that its own products may use tf32."""
    if t.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"


def power_of_two(n: int) -> int:
    """The next power of two at or above n."""
    return 1 << max(n - 1, 0).bit_length()
