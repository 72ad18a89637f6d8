"""What every launch needs: the device's facts, a short way into Triton, descriptors."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..tuning import Target
from . import threads  # noqa: F401 (Triton is used by several)
from .here import here
from .recipe import Names, profiled

# Versions whose launcher `_start` knows; 3.7 and 3.8 were not run on a GPU.
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_AS_READ = (3, 6) <= _VERSION <= (3, 9) and torch.version.hip is None


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
        self.values = (*shape, *strides)  # as a compiled kernel takes them, after the map

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
class Bound:
    """A kernel with its compile-time options, and the ways into what Triton compiled of it so far.

    A caller that keeps it spares `launch` the options, which take longer than the arguments.
    """

    __slots__ = ("kernel", "options", "sizes", "starts")

    def __init__(self, kernel, **options) -> None:
        # Said, since Triton 3.9 warns where it is not, and 3.10 will multiply and add apart.
        self.kernel, self.options = kernel, {"enable_fp_fusion": True, **options}
        # Places of the integers that Triton compiles nothing anew for, such as the tokens' number.
        self.sizes = frozenset(p.num for p in getattr(kernel, "params", ()) if p.do_not_specialize)
        self.starts: list[Callable[..., bool]] = []  # see `_start`


_bound: dict[tuple, Bound] = {}


def _bind(kernel, options: dict[str, Any]) -> Bound:
    """Functions count by identity, since their own hash is made from their source every time."""
    key = (id(kernel), *[id(v) if callable(v) else v for v in options.values()])
    found = _bound.get(key)
    if found is None:
        found = _bound[key] = Bound(kernel, **options)
    return found


def launch(kernel, grid: tuple[int, ...], *args, **options) -> None:
    """`kernel[grid](*args, **options)`, less what Triton does anew at every call.

    Triton binds, specialises and looks up for 38 µs. What it finds is kept with the conditions
    under which it would find it again, so a second launch goes to the compiled kernel at once.
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
        if not here.knows_the_gpu:
            # Autograd's thread may come here before anything called CUDA in it: maps need that.
            torch.cuda.Event().record()
            here.knows_the_gpu = True
        if not profiled():
            stream = torch._C._cuda_getCurrentRawStream(index)
            for start in bound.starts:
                if start(index, stream, grid, *args):
                    if here.recording is not None:
                        _note(start, grid, args)
                    return None
    if here.recording is not None:
        here.recording.refused = True  # Triton has more to do, at least this time
    own = [a[1].of(a[0]) if type(a) is tuple else a for a in args]
    if first.is_meta:
        bound.kernel.warmup(*own, grid=grid, **bound.options)
        return None
    compiled = bound.kernel[grid](*own, **bound.options)
    if _AS_READ and index >= 0 and not profiled():
        again = _start(bound, compiled, index, args)
        if again is not None:
            bound.starts.append(again)
    return None


_MOST_MAPS = 256  # of one descriptor: a training step comes back to the same addresses


class _Maps(dict):
    """What the copy engine reads through, by address and boxes: filled when it is asked for."""

    def __init__(self, meta: dict[str, Any]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        dtype = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        self.kind = (meta["swizzle"], meta["elem_size"], dtype, meta["block_size"])

    def __missing__(self, key: tuple[int, Boxes]) -> Any:
        address, boxes = key
        if len(self) == _MOST_MAPS:
            self.clear()
        found = _fill_map()(address, *self.kind, boxes.shape, boxes.strides, 0)
        self[key] = found
        return found


@cache
def _fill_map():
    utils = triton.runtime.driver.active.utils
    newer = getattr(utils, "fill_tma_descriptor_tiled", None)  # since Triton 3.7
    return newer or utils.fill_tma_descriptor


class Compiled(NamedTuple):
    """A kernel that Triton compiled, and how it is called: all but grid, stream and arguments."""

    run: Callable
    head: Sequence
    maps: Sequence[_Maps]  # one for each descriptor
    constants: Sequence
    as_one: bool  # whether `run` takes the kernel's arguments, constants too, as one tuple

    def call(self, grid: str, arguments: Iterable[str], named: Callable[[Any], str]) -> str:
        """The line that runs it; `named` gives a value a name in that line."""
        passed = ", ".join([*arguments, *map(named, self.constants)])
        passed = f"({passed},)" if self.as_one else passed
        return f"{named(self.run)}({grid}, stream, {', '.join(map(named, self.head))}, {passed})"


def _start(bound: Bound, compiled, index: int, args: tuple) -> Callable[..., bool] | None:
    """A function that launches `compiled` for arguments for which Triton would, those like `args`.

    None where Triton's `CudaLauncher` has more to do at every launch. Its own `launch` is a C
    function, or a closure around it that fills descriptors.
    """
    launcher = compiled.run
    checked = getattr(launcher, "gsan_enabled", False)
    if launcher.global_scratch_size or launcher.profile_scratch_size or checked:
        return None
    run, metas = launcher.launch, []
    if any(type(a) is tuple for a in args):
        cells = zip(run.__code__.co_freevars, run.__closure__, strict=True)
        held = {name: cell.cell_contents for name, cell in cells}
        run, metas = held["launcher"], held["tensordesc_meta"]
        if not metas or not all(metas):  # no copy engine: Triton takes descriptors apart
            return None
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    scratch, hooks = (None, None), (None, None, None)
    # Since Triton 3.7 one C function serves all kernels and takes their arguments as one.
    one_for_all = hasattr(launcher, "kernel_signature")
    last: tuple
    if one_for_all:
        described = (launcher.arg_annotations, launcher.kernel_signature)
        last = (compiled.packed_metadata, *hooks, *scratch, *described)
    else:
        last = (*scratch, compiled.packed_metadata, *hooks)
    constants = [bound.options[name] for name in bound.kernel.arg_names[len(args) :]]
    head = (compiled.function, *flags, *last)
    found = Compiled(run, head, list(map(_Maps, metas)), constants, one_for_all)
    return _written_out(found, args, bound.sizes, index)


def _written_out(
    compiled: Compiled, args: tuple, sizes: frozenset[int], index: int
) -> Callable[..., bool]:
    """`start(index, stream, grid, *args)`: whether arguments are like `args`; if so, run.

    Written out for its arguments, since a loop over them and a lookup take longer: 82 µs for the 14
    launches of a step, on an Arm core, where these take 65. Alike are dtypes, blocks, None,
    alignment to 16 bytes; of an integer whether it is 1, divides by 16, and has 32 bits.
    """
    names = Names()
    named = names.of
    read, alike, values = [], [f"index == {index}"], []
    maps = iter(compiled.maps)
    for i, a in enumerate(args):
        name = f"a{i}"
        if type(a) is tuple:
            read.append(f"t{i}, b{i} = {name}")
            alike.append(f"b{i}.kind is {named(a[1].kind)}")
            values.append(f"{named(next(maps))}[t{i}.data_ptr(), b{i}], *b{i}.values")
        elif a is None:
            alike.append(f"{name} is None")
            values.append("None")
        elif type(a) is int:
            alike.append(f"({name}.bit_length() > 31) is {a.bit_length() > 31}")
            if i not in sizes:
                alike.append(f"({name} == 1) is {a == 1}")
                alike.append(f"({name} & 15 == 0) is {a & 15 == 0}")
            values.append(name)
        elif type(a) is float:
            alike.append(f"type({name}) is float")
            values.append(name)
        else:
            read.append(f"p{i} = {name}.data_ptr()")
            alike.append(f"{name}.dtype is {named(a.dtype)}")
            alike.append(f"(p{i} & 15 == 0) is {a.data_ptr() & 15 == 0}")
            values.append(f"p{i}")
    given = ", ".join(f"a{i}" for i in range(len(args)))
    lines = [
        f"def start(index, stream, grid, {given}):",
        "    try:",
        *[f"        {line}" for line in read],
        f"        alike = {' and '.join(alike)}",
        "    except (AttributeError, TypeError, ValueError):",
        "        return False",
        "    if alike:",
        f"        {compiled.call('*grid, *(1, 1, 1)[len(grid):]', values, named)}",
        "    return alike",
    ]
    exec("\n".join(lines), names)
    start = names["start"]
    start.compiled = compiled
    return start


def _note(start: Any, grid: tuple[int, ...], args: tuple) -> None:
    """Tell the recording what `start` has done: the same call, with nothing open but addresses."""
    named = here.recording.names.of
    maps = iter(start.compiled.maps)
    tensors, values = [], []
    for a in args:
        if type(a) is tuple:
            tensors.append(a[0])
            values += [f"{named(next(maps))}[{{}}, {named(a[1])}]", *map(named, a[1].values)]
        elif isinstance(a, torch.Tensor):
            tensors.append(a)
            values.append("{}")
        else:
            values.append(named(a))
    sizes = ", ".join(map(named, (*grid, 1, 1)[:3]))
    here.recording.launched(start.compiled.call(sizes, values, named), tensors)


def dot_precision(t: torch.Tensor) -> str:
    """IEEE for fp32, unless PyTorch was told that its own products may use tf32."""
    if t.dtype != torch.float32:
        return "ieee"
    if here.recording is not None:
        here.recording.refused = True  # it may be told something else the next time
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def power_of_two(n: int) -> int:
    """The next power of two at or above n."""
    return 1 << max(n - 1, 0).bit_length()
