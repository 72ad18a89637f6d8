"""Launch kernels: properties of the device, and a cache of compiled kernels by signature."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton.knobs import runtime
from triton.runtime.driver import driver

from ..tuning import Target
from . import triton_locks  # noqa: F401 Triton is called from several threads
from .descriptors import Boxes
from .thread_state import thread_state

# Versions whose launcher `_compiled` knows; 3.7 and 3.8 were not run on a GPU.
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_CACHED = (3, 6) <= _VERSION <= (3, 9) and torch.version.hip is None
# `torch.cuda.current_device` also looks whether CUDA is initialized: 2 of 100 µs a launch.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@cache
def _target_of(index: int) -> Target:
    major, minor = torch.cuda.get_device_capability(index)
    properties = torch.cuda.get_device_properties(index)
    return Target(10 * major + minor, properties.multi_processor_count)


def target_of(t: torch.Tensor) -> Target:
    """The device that a kernel on `t` runs on: for meta tensors, which only compile, the current
    GPU, and for the interpreter a small Hopper without Gluon."""
    index = torch.cuda.current_device() if t.is_meta else t.get_device()
    return Target(90, 4, gluon=False) if index < 0 else _target_of(index)


class Bound:
    """A kernel with its compile-time options, and what Triton compiled of it, by signature."""

    __slots__ = ("compiled", "kernel", "options", "unspecialized")

    def __init__(self, kernel, **options) -> None:
        # Explicit: Triton 3.9 warns if it is missing, and 3.10 will not fuse by default.
        self.kernel, self.options = kernel, {"enable_fp_fusion": True, **options}
        params = getattr(kernel, "params", ())
        self.unspecialized = frozenset(p.num for p in params if p.do_not_specialize)
        self.compiled: dict[tuple, _Compiled | None] = {}


_bound: dict[tuple, Bound] = {}


def _bind(kernel, options: dict[str, Any]) -> Bound:
    """Functions are compared by identity: Triton hashes their source at every call."""
    key = (id(kernel), *[id(v) if callable(v) else v for v in options.values()])
    found = _bound.get(key)
    if found is None:
        found = _bound[key] = Bound(kernel, **options)
    return found


def launch(kernel, grid: tuple[int, ...], *args, **options) -> None:
    """`kernel[grid](*args, **options)` with a cache: Triton's own binding takes 38 µs a launch.

    `args` come first in the kernel's signature, the compile-time `options` after them; a `Bound`
    kernel brings its options. A descriptor is passed as (tensor, Boxes). The first argument tells
    the device. On the meta device a launch compiles the kernel, or notes it in a dry run.
    """
    bound = kernel if type(kernel) is Bound else _bind(kernel, options)
    first = args[0][0] if type(args[0]) is tuple else args[0]
    index = first.get_device()
    signature: tuple | None = None
    if index >= 0:
        if index != _current_device():
            with torch.cuda.device(index):
                return launch(bound, grid, *args)
        if not thread_state.has_cuda_context:
            # TMA descriptors need a CUDA context, which autograd's thread may not have yet.
            torch.cuda.Event().record()
            thread_state.has_cuda_context = True
        if _CACHED and not runtime.launch_enter_hook.calls:  # a profiler's, called by Triton itself
            kinds, values = read(args, bound.unspecialized)
            signature = (index, *kinds)
            compiled = bound.compiled.get(signature)
            if compiled is not None:
                compiled.start(grid, driver.active.get_current_stream(index), values)
                return None
    own = [a[1].of(a[0]) if type(a) is tuple else a for a in args]
    if first.is_meta:
        if thread_state.dry_run is None:
            bound.kernel.warmup(*own, grid=grid, **bound.options)
        else:
            thread_state.dry_run.append(bound.kernel)
        return None
    if signature is not None and (step := thread_state.step()) is not None:
        step.precompile(index)
    found = bound.kernel[grid](*own, **bound.options)
    if signature is not None:
        bound.compiled[signature] = _compiled(bound, found, args)
    return None


def read(args: tuple, unspecialized: frozenset[int]) -> tuple[list, list]:
    """The signature of a launch, for which Triton compiles, and the values its C launcher takes.

    The signature has dtypes, blocks, None, alignment of addresses to 16 bytes; of an integer
    whether it is 1, divides by 16 and fits 32 bits. The value of a descriptor is (address, Boxes).
    """
    kinds: list = []
    values: list = []
    integers = 0
    for i, a in enumerate(args):
        kind = type(a)
        if kind is tuple:
            t, boxes = a
            kinds.append(boxes.kind)
            values.append((t.data_ptr(), boxes))
            values += boxes.values
        elif kind is int:
            divisor = 1 if a == 1 else 16 if a & 15 == 0 else 0
            kinds.append(kind if i in unspecialized else divisor)
            values.append(a)
            integers |= a
        elif a is None or kind is float:
            kinds.append(kind)
            values.append(a)
        else:
            address = a.data_ptr()
            kinds.append(a.dtype if address & 15 == 0 else (a.dtype, "unaligned"))
            values.append(address)
    if integers >> 31:  # rare, so only then does the signature say which are of 64 bits
        kinds += [type(a) is int and a >> 31 for a in args]
    return kinds, values


class _Maps(dict):
    """TMA descriptors of one argument by (address, Boxes), encoded when first asked for.

    A training step comes back to the same addresses; encoding takes longer than a launch.
    """

    _MOST = 256

    def __init__(self, meta: dict[str, Any]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        dtype = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        self.kind = (meta["swizzle"], meta["elem_size"], dtype, meta["block_size"])

    def __missing__(self, key: tuple[int, Boxes]) -> Any:
        address, boxes = key
        if len(self) == self._MOST:
            self.clear()
        found = _encode()(address, *self.kind, boxes.shape, boxes.strides, 0)
        self[key] = found
        return found


@cache
def _encode():
    utils = driver.active.utils
    newer = getattr(utils, "fill_tma_descriptor_tiled", None)  # since Triton 3.7
    return newer or utils.fill_tma_descriptor


class _Compiled(NamedTuple):
    """A compiled kernel and how Triton's C launcher is called for it."""

    run: Callable
    head: tuple  # arguments between the stream and the kernel's own
    maps: Sequence[tuple[int, _Maps]]  # of each descriptor, with its place among the values
    constants: Sequence
    packed: bool  # whether `run` takes the kernel's arguments as one tuple

    def start(self, grid: tuple[int, ...], stream: int, values: list) -> None:
        for place, maps in self.maps:
            values[place] = maps[values[place]]
        values += self.constants
        x, y, z = (*grid, 1, 1)[:3]
        if self.packed:
            self.run(x, y, z, stream, *self.head, tuple(values))
        else:
            self.run(x, y, z, stream, *self.head, *values)


def _compiled(bound: Bound, compiled, args: tuple) -> _Compiled | None:
    """How to launch `compiled` without `CudaLauncher`; None where that does more at every launch.

    Its `launch` is a C function, or a closure around it that encodes descriptors.
    """
    launcher = compiled.run
    checked = getattr(launcher, "gsan_enabled", False)
    if launcher.global_scratch_size or launcher.profile_scratch_size or checked:
        return None
    run, metas = launcher.launch, []
    _, values = read(args, bound.unspecialized)
    places = [i for i, value in enumerate(values) if type(value) is tuple]
    if places:
        cells = zip(run.__code__.co_freevars, run.__closure__, strict=True)
        held = {name: cell.cell_contents for name, cell in cells}
        run, metas = held["launcher"], held["tensordesc_meta"]
        if not metas or not all(metas):  # no TMA: Triton takes descriptors apart
            return None
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    scratch, hooks = (None, None), (None, None, None)
    # Since Triton 3.7 one C function serves all kernels and takes their arguments as one.
    packed = hasattr(launcher, "kernel_signature")
    last: tuple
    if packed:
        described = (launcher.arg_annotations, launcher.kernel_signature)
        last = (compiled.packed_metadata, *hooks, *scratch, *described)
    else:
        last = (*scratch, compiled.packed_metadata, *hooks)
    constants = [bound.options[name] for name in bound.kernel.arg_names[len(args) :]]
    head = (compiled.function, *flags, *last)
    maps = [(place, _Maps(meta)) for place, meta in zip(places, metas, strict=True)]
    return _Compiled(run, head, maps, constants, packed)


def dot_precision(t: torch.Tensor) -> str:
    """IEEE for fp32, unless PyTorch was told that its own GEMMs may use tf32."""
    if t.dtype != torch.float32:
        return "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def power_of_two(n: int) -> int:
    """The next power of two at or above n."""
    return 1 << max(n - 1, 0).bit_length()
