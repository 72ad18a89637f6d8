"""What every launch needs: the device's facts, a short way into Triton, descriptors, alignment."""

import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..notices import say_once
from ..tuning import Target

_AS_TRIED = triton.__version__.startswith("3.6.") and torch.version.hip is None


@cache
def _target_of(index: int) -> Target:
    major, minor = torch.cuda.get_device_capability(index)
    properties = torch.cuda.get_device_properties(index)
    return Target(10 * major + minor, properties.multi_processor_count)


def target_of(t: torch.Tensor) -> Target:
    """The device that a kernel on `t` runs on; the interpreter is a small Hopper without Gluon.

    What is launched on the meta device is compiled for the current GPU.
    """
    if t.is_meta:
        return _target_of(torch.cuda.current_device())
    return _target_of(t.device.index) if t.is_cuda else Target(90, 4, gluon=False)


# --- descriptors ----------------------------------------------------------------------------------
class Boxes:
    """How a tensor is cut into boxes: all of a descriptor but its address.

    An argument of `launch` is a pair of tensor and boxes. These are made once for a shape: making
    a descriptor of Triton's takes longer than a launch.
    """

    __slots__ = ("block", "kind", "layout", "shape", "strides")

    def __init__(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int],
        block: Sequence[int], layout: Any = None,
    ) -> None:  # fmt: skip
        self.shape, self.strides, self.block = list(shape), list(strides), list(block)
        self.layout = layout
        self.kind = (dtype, *block)  # what a kernel is compiled for

    def of(self, t: torch.Tensor) -> Any:
        """The descriptor, Gluon's where there is a layout, as Triton's own way takes it."""
        if self.layout is None:
            return TensorDescriptor(t, self.shape, self.strides, self.block)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Gluon

        return Gluon(t, self.shape, self.strides, self.block, self.layout)


@lru_cache(maxsize=1024)
def _boxes(dtype, shape, strides, block) -> Boxes:
    return Boxes(dtype, shape, strides, block)


def descriptor(t: torch.Tensor, block: list[int]) -> tuple[torch.Tensor, Boxes]:
    return t, _boxes(t.dtype, t.shape, t.stride(), tuple(block))


# --- launching ------------------------------------------------------------------------------------
class _Ready(NamedTuple):
    """A compiled kernel and all that its launches share."""

    run: Any
    head: tuple  # what `run` takes between the stream and the arguments
    descriptors: tuple  # of each, last first: its place, and what its map takes after the address
    constants: tuple


_ready: dict[tuple, _Ready] = {}
_thread = threading.local()
_sizes: dict[int, frozenset[int]] = {}


def _sizes_of(kernel) -> frozenset[int]:
    """Places of the integers that Triton compiles nothing anew for, such as the number of tokens.

    By identity, since a kernel's own hash is made from its source every time.
    """
    found = _sizes.get(id(kernel))
    if found is None:
        places = frozenset(p.num for p in kernel.params if p.do_not_specialize)
        found = _sizes[id(kernel)] = places
    return found


def launch(kernel, grid: tuple[int, ...], *args, **options) -> None:
    """`kernel[grid](*args, **options)`, less what Triton does anew at every call.

    Triton binds, specialises and looks up for 38 µs; what it finds depends only on what `key`
    holds, so a second launch goes to the compiled kernel at once, with addresses for tensors.
    `args` come first in the signature, the compile-time `options` after them; the first argument
    tells the device. On the meta device a launch compiles and runs nothing.
    """
    first = args[0]
    if type(first) is tuple:
        first = first[0]
    index = first.get_device()
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return launch(kernel, grid, *args, **options)
    if index >= 0 and not hasattr(_thread, "knows_the_gpu"):
        # Autograd's thread may come here before anything called CUDA in it; descriptors need that.
        torch.cuda.Event().record()
        _thread.knows_the_gpu = True
    # What Triton compiles anew for: dtypes, alignment, ones, multiples of 16, blocks, options. A
    # device function counts by identity, since its own hash is made from its source every time.
    key = [id(kernel), index]
    values: list[Any] = []
    unaligned = 0
    sizes = _sizes_of(kernel) if index >= 0 else ()
    for place, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            address = a.data_ptr()
            unaligned |= address & 15
            key.append(a.dtype)
            values.append(address)
        else:
            key.append(
                None if a is None
                else a[1].kind if type(a) is tuple
                else a.bit_length() > 31 if place in sizes
                else (a == 1, not a & 15, a.bit_length() > 31)
            )  # fmt: skip
            values.append(a)
    if unaligned:
        key += [isinstance(a, torch.Tensor) and a.data_ptr() & 15 == 0 for a in args]
    key += [id(v) if callable(v) else v for v in options.values()]
    found = _ready.get(tuple(key))
    if found is None or triton.knobs.runtime.launch_enter_hook.calls:  # a profiler listens
        own = [a[1].of(a[0]) if type(a) is tuple else a for a in args]
        if first.is_meta:
            kernel.warmup(*own, grid=grid, **options)
            return None
        compiled = kernel[grid](*own, **options)
        if _AS_TRIED and index >= 0:
            constants = tuple(options[name] for name in kernel.arg_names[len(args) :])
            ready = _make_ready(compiled, args, constants)
            if ready is not None:
                _ready[tuple(key)] = ready
        return None
    _start(found, grid, torch._C._cuda_getCurrentRawStream(index), args, values)
    return None


def _start(ready: _Ready, grid: tuple[int, ...], stream: int, args: tuple, values: list) -> None:
    """`values` are `args` with addresses for tensors; descriptors follow here."""
    fill = _fill_map()
    for place, swizzle, itemsize, dtype, block in ready.descriptors:
        t, boxes = args[place]
        box_map = fill(t.data_ptr(), swizzle, itemsize, dtype, block, boxes.shape, boxes.strides, 0)
        values[place : place + 1] = (box_map, *boxes.shape, *boxes.strides)
    x, y, z = (*grid, 1, 1)[:3]
    ready.run(x, y, z, stream, *ready.head, *values, *ready.constants)


@cache
def _fill_map():
    return triton.runtime.driver.active.utils.fill_tma_descriptor


def _make_ready(compiled, args: tuple, constants: tuple) -> _Ready | None:
    """What Triton 3.6's `CudaLauncher` does at every launch, done once; None where it must be.

    Its `launch` is the generated C function, or a closure around it that fills descriptors.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    run, places, metas = launcher.launch, [], []
    if any(type(a) is tuple for a in args):
        cells = zip(run.__code__.co_freevars, run.__closure__, strict=True)
        held = {name: cell.cell_contents for name, cell in cells}
        run, metas = held["launcher"], held["tensordesc_meta"]
        places = [i for i, a in enumerate(args) if type(a) is tuple]
        if not all(metas):  # no copy engine: Triton takes descriptors apart
            return None
    descriptors = tuple(
        (
            place, meta["swizzle"], meta["elem_size"],
            TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"],
        )
        for place, meta in reversed(list(zip(places, metas, strict=True)))
    )  # fmt: skip
    scratch, hooks = (None, None), (None, None, None)
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    head = (compiled.function, *flags, *scratch, compiled.packed_metadata, *hooks)
    return _Ready(run, head, descriptors, constants)


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
