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
_kinds: dict[tuple, object] = {}


class Boxes:
    """How a tensor is cut into boxes: all of a descriptor but its address.

    An argument of `launch` is a pair of tensor and boxes. These are made once for a shape: making
    a descriptor of Triton's takes longer than a launch.
    """

    __slots__ = ("block", "kind", "layout", "shape", "strides", "values")

    def __init__(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int],
        block: Sequence[int], layout: Any = None,
    ) -> None:  # fmt: skip
        self.shape, self.strides, self.block = list(shape), list(strides), list(block)
        self.layout = layout
        # What a kernel is compiled for, as one object, which hashes faster than its parts.
        self.kind = _kinds.setdefault((dtype, *block), object())
        self.values = (None, *shape, *strides)  # as a compiled kernel takes them, after the map

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
class _Descriptor(NamedTuple):
    """An argument that the copy engine reads through a map, which is filled for an address."""

    place: int  # among the arguments
    position: int  # of the map among the compiled kernel's
    kind: tuple  # what a map takes between address and shape
    maps: dict[tuple[int, Boxes], Any]  # those filled so far


class _Ready(NamedTuple):
    """A compiled kernel and all that its launches share."""

    run: Any
    head: tuple  # what `run` takes between the stream and the arguments
    descriptors: tuple[_Descriptor, ...]
    constants: tuple


class Bound:
    """A kernel with its compile-time options, and what Triton compiled of it so far.

    A caller that keeps it spares `launch` the options, which take longer than the arguments.
    """

    __slots__ = ("kernel", "options", "ready", "sizes")

    def __init__(self, kernel, **options) -> None:
        self.kernel, self.options = kernel, options
        # Places of the integers that Triton compiles nothing anew for, such as the tokens' number.
        self.sizes = frozenset(p.num for p in getattr(kernel, "params", ()) if p.do_not_specialize)
        self.ready: dict[tuple, _Ready] = {}


_bound: dict[tuple, Bound] = {}
_thread = threading.local()
# Held where Triton may load a kernel's launcher. Python makes one module of all launchers, since
# they share a name, so that threads that load them side by side get each other's.
loading = threading.RLock()


def _bind(kernel, options: dict[str, Any]) -> Bound:
    """Functions count by identity, since their own hash is made from their source every time."""
    key = (id(kernel), *[id(v) if callable(v) else v for v in options.values()])
    found = _bound.get(key)
    if found is None:
        found = _bound[key] = Bound(kernel, **options)
    return found


def launch(kernel, grid: tuple[int, ...], *args, **options) -> None:
    """`kernel[grid](*args, **options)`, less what Triton does anew at every call.

    Triton binds, specialises and looks up for 38 µs; what it finds depends only on what `key`
    holds, so a second launch goes to the compiled kernel at once, with addresses for tensors.
    `args` come first in the signature, the compile-time `options` after them, or `kernel` has
    them: see `Bound`. The first argument tells the device. On the meta device a launch compiles
    and runs nothing.
    """
    bound = kernel if type(kernel) is Bound else _bind(kernel, options)
    first = args[0]
    if type(first) is tuple:
        first = first[0]
    index = first.get_device()
    if index >= 0:
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return launch(bound, grid, *args)
        if not hasattr(_thread, "knows_the_gpu"):
            # Autograd's thread may come here before anything called CUDA in it: maps need that.
            torch.cuda.Event().record()
            _thread.knows_the_gpu = True
    # What Triton compiles anew for: dtypes, alignment, ones, multiples of 16, blocks.
    key: list[Any] = []
    values: list[Any] = []
    addresses = 0
    for a in args:
        kind = type(a)
        if kind is tuple:
            boxes = a[1]
            key.append(boxes.kind)
            values += boxes.values
        elif kind is int:
            large = a.bit_length() > 31
            key.append(large if len(key) in bound.sizes else (a == 1, not a & 15, large))
            values.append(a)
        elif a is None:
            key.append(None)
            values.append(None)
        else:  # a tensor; asking for it would be the longest part of this loop
            address = a.data_ptr()
            addresses |= address
            key.append(a.dtype)
            values.append(address)
    if addresses & 15:
        key += [isinstance(a, torch.Tensor) and a.data_ptr() & 15 == 0 for a in args]
    key.append(index)
    ready = bound.ready.get(tuple(key))
    if ready is None or triton.knobs.runtime.launch_enter_hook.calls:  # a profiler listens
        own = [a[1].of(a[0]) if type(a) is tuple else a for a in args]
        if first.is_meta:
            bound.kernel.warmup(*own, grid=grid, **bound.options)
            return None
        with loading:
            compiled = bound.kernel[grid](*own, **bound.options)
        if _AS_TRIED and index >= 0:
            names = bound.kernel.arg_names[len(args) :]
            ready = _make_ready(compiled, args, tuple(bound.options[name] for name in names))
            if ready is not None:
                bound.ready[tuple(key)] = ready
        return None
    _start(ready, grid, torch._C._cuda_getCurrentRawStream(index), args, values)
    return None


_REST = ((1, 1, 1), (1, 1), (1,), ())  # of a grid
_MOST_MAPS = 256  # of one descriptor: a training step comes back to the same addresses


def _start(ready: _Ready, grid: tuple[int, ...], stream: int, args: tuple, values: list) -> None:
    """`values` are `args` as the compiled kernel takes them, but for the maps of descriptors."""
    for place, position, kind, maps in ready.descriptors:
        t, boxes = args[place]
        address = t.data_ptr()
        found = maps.get((address, boxes))
        if found is None:
            if len(maps) == _MOST_MAPS:
                maps.clear()
            found = _fill_map()(address, *kind, boxes.shape, boxes.strides, 0)
            maps[address, boxes] = found
        values[position] = found
    ready.run(*grid, *_REST[len(grid)], stream, *ready.head, *values, *ready.constants)


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
    run, metas = launcher.launch, []
    places = [place for place, a in enumerate(args) if type(a) is tuple]
    if places:
        cells = zip(run.__code__.co_freevars, run.__closure__, strict=True)
        held = {name: cell.cell_contents for name, cell in cells}
        run, metas = held["launcher"], held["tensordesc_meta"]
        if not all(metas):  # no copy engine: Triton takes descriptors apart
            return None
    lengths = [len(a[1].values) if type(a) is tuple else 1 for a in args]
    descriptors = tuple(
        _Descriptor(
            place, sum(lengths[:place]),
            (
                meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
                meta["block_size"],
            ), {},
        )
        for place, meta in zip(places, metas, strict=True)
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
