"""What every launch needs: the device's facts, a short way into Triton, descriptors, alignment."""

from functools import cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..notices import say_once
from ..tuning import Target

_AS_TRIED = triton.__version__.startswith("3.6.")
_compiled: dict[tuple, tuple] = {}


@cache
def _target_of(index: int) -> Target:
    major, minor = torch.cuda.get_device_capability(index)
    properties = torch.cuda.get_device_properties(index)
    return Target(10 * major + minor, properties.multi_processor_count)


def target_of(t: torch.Tensor) -> Target:
    """The device that a kernel on `t` runs on; the interpreter is a small Hopper without Gluon."""
    return _target_of(t.device.index) if t.is_cuda else Target(90, 4, gluon=False)


def launch(kernel, grid: tuple[int, ...], *args, **options) -> None:
    """`kernel[grid](*args, **options)`, less what Triton does anew at every call.

    Triton binds, specialises and looks up for 38 µs; what it finds depends only on what `key`
    holds, so a second launch goes to the compiled kernel at once. `args` come first in the
    signature, the compile-time `options` after them; the first argument tells the device.
    """
    first = args[0]
    device = (first if isinstance(first, torch.Tensor) else first.base).device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, **options)
    key = (id(kernel), device.index, *_specialisation(args, options))
    found = _compiled.get(key)
    if found is None or triton.knobs.runtime.launch_enter_hook.calls:  # a profiler listens
        compiled = kernel[grid](*args, **options)
        if _AS_TRIED and device.type == "cuda":
            names = kernel.arg_names[len(args) :]
            _compiled[key] = (compiled, tuple(options[name] for name in names))
        return None
    compiled, constants = found
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(
        x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *args, *constants,
    )  # fmt: skip
    return None


def _specialisation(args: tuple, options: dict) -> list:
    """What Triton compiles anew for: dtypes, alignment, ones, multiples of 16, blocks, options.

    In one expression, since it runs for a hundred arguments a step; a device function counts by
    identity, since its own hash is made from its source every time.
    """
    return [
        None if a is None
        else (a.dtype, not a.data_ptr() & 15) if isinstance(a, torch.Tensor)
        else (a == 1, not a & 15, a.bit_length() > 31) if isinstance(a, int)
        else (a.base.dtype, *a.block_shape)
        for a in args
    ] + [id(v) if callable(v) else v for v in options.values()]  # fmt: skip


def descriptor(t: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)


def aligned(t: torch.Tensor) -> torch.Tensor:
    """`t`, or a copy where it does not start on 16 bytes (a slice of a flat buffer may not)."""
    if t.data_ptr() % 16 == 0:
        return t
    say_once(
        f"a tensor of shape {tuple(t.shape)} does not start on 16 bytes and is copied each time"
    )
    return t.clone(memory_format=torch.preserve_format)


def dot_precision(t: torch.Tensor) -> str:
    """IEEE for fp32, unless PyTorch was told that its own products may use tf32."""
    if t.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"


def power_of_two(n: int) -> int:
    """The next power of two at or above n."""
    return 1 << max(n - 1, 0).bit_length()
