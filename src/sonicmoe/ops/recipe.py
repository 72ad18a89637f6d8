"""Operators written out: on arguments of a kind, one always allocates and launches the same.

Which buffers and which kernels, the sizes decide, in Python. The second time that arguments of a
kind come, all of it is written down, and from then on done again by one function that decides
nothing: a third less of the host's time for the experts (docs/log/host-time.md).
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, wraps
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..tuning import when_forgotten
from . import memory
from .here import here

_MOST = 256  # kinds of arguments that an operator remembers; the oldest goes first
# Of each operator, by the kind of its arguments; None for a kind that none can be made for.
known: dict[str, dict[tuple, Callable | None]] = {}


@cache
def _triton():
    import triton  # which a launch needs anyway

    return triton


def profiled() -> bool:
    """Whether somebody wants to hear of launches from Triton itself."""
    return bool(_triton().knobs.runtime.launch_enter_hook.calls)


def by_recipe(function: Callable, schema: torch.FunctionSchema) -> Callable:
    """An operator whose last argument is the backend, done by its recipe where it has one."""
    recipes = known[schema.name] = {}
    kind_of = _kind_of(schema)
    when_forgotten(recipes.clear)

    @wraps(function)
    def call(*args):
        if args[-1] != "triton" or here.recording is not None:  # a part of another operator
            return function(*args)
        index = args[0].get_device()
        if index < 0 or index != torch._C._cuda_getDevice() or profiled():
            return function(*args)
        kind = kind_of(index, *args)
        recipe = recipes.get(kind, _never_seen)
        if recipe is _never_seen:
            if len(recipes) >= _MOST:
                for oldest in list(recipes)[:1]:  # unless another thread was faster
                    recipes.pop(oldest, None)
            recipes[kind] = _seen_once
        elif recipe is _seen_once:
            with Recording(args) as recording:
                result = function(*args)
            recipes[kind] = recording.recipe(result)
            return result
        elif recipe is not None and here.knows_the_gpu:  # else a launch sees to it
            return recipe(torch._C._cuda_getCurrentRawStream(index), *args)
        return function(*args)

    return call


def _kind_of(schema: torch.FunctionSchema) -> Callable[..., tuple]:
    """All that an operator may look at: of a tensor everything but its values.

    Written out, since a loop over the arguments takes twice as long: 15 µs for 19 of them.
    """
    parts = []
    for argument in schema.arguments:
        name, kind = argument.name, str(argument.type)
        if "Tensor" in kind:
            looks = f"{name}.shape, {name}.stride(), {name}.dtype, {name}.data_ptr() & 15"
            parts.append(looks if kind == "Tensor" else f"{name} is not None and ({looks})")
        else:
            parts.append(name)
    names = ", ".join(argument.name for argument in schema.arguments)
    return eval(f"lambda index, {names}: (index, {', '.join(parts)})")


def _never_seen() -> None: ...


def _seen_once() -> None: ...


class Names(dict[str, Any]):
    """What the values in lines of Python are called, which are written out to be run."""

    def of(self, value: Any) -> str:
        name = f"v{len(self)}"
        self[name] = value
        return name


class Recording(TorchDispatchMode):
    """What an operator does in this thread: buffers, zeros and launches, a line of Python for each.

    Refused is whatever else PyTorch computes, and a tensor that is not known by its address.
    """

    def __init__(self, args: Sequence) -> None:
        super().__init__()
        # With no size in a line, lines are the same for all of them.
        self.names = Names(memory=memory)
        self._lines: list[tuple[str, set[str]]] = []  # and the tensors that are needed for it
        self._buffers: dict[str, tuple] = {}  # shape, strides, dtype
        self._extents: list[tuple[int, int, str]] = []  # address, bytes, name
        self._parameters = [f"a{i}" for i in range(len(args))]
        for name, a in zip(self._parameters, args, strict=True):
            if isinstance(a, torch.Tensor):
                self._extents.append((a.data_ptr(), _extent(a), name))
        # What shares memory now may not do so the next time.
        inside = sorted((start, start + size) for start, size, _ in self._extents if size)
        self.refused = any(end > start for (_, end), (start, _) in pairwise(inside))

    def __enter__(self) -> "Recording":
        here.recording = self
        return super().__enter__()

    def __exit__(self, *error) -> None:
        here.recording = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.zero_.default and args[0].is_contiguous():
            name, offset = self._found(args[0]) or ("", 0)
            self.refused |= name not in self._buffers or offset > 0
            self._lines.append((f"{name}.zero_()", {name}))
        elif not func.is_view:
            self.refused = True
        return func(*args, **(kwargs or {}))

    def allocated(self, t: torch.Tensor) -> None:
        """It may take the place of a buffer that was given back: the last one is found first."""
        name = f"t{len(self._buffers)}"
        self._buffers[name] = _looks(t)
        self._extents.append((t.data_ptr(), _extent(t), name))
        how = ", ".join(map(self.names.of, _looks(t)))
        self._lines += [
            (f"{name} = memory.on_current_gpu({how})", set()),
            (f"{name}_at = {name}.data_ptr()", {name}),
        ]

    def launched(self, line: str, tensors: Sequence[torch.Tensor]) -> None:
        """`line` launches on `stream`, with {} for the address of each of the tensors."""
        addresses, needed = [], set()
        for t in tensors:
            name, offset = self._found(t) or ("", 0)
            self.refused |= not name
            addresses.append(f"{name}_at + {self.names.of(offset)}" if offset else f"{name}_at")
            needed.add(name)
        self._lines.append((line.format(*addresses), needed))

    def _found(self, t: torch.Tensor) -> tuple[str, int] | None:
        """The argument or buffer that `t` lies in, and how far from its beginning."""
        at = t.data_ptr()
        for start, size, name in reversed(self._extents):
            if start <= at < start + size or start == at:
                return name, at - start
        return None

    def recipe(self, result: Any) -> Callable | None:
        """`recipe(stream, *args)`, which returns what is now `result`; None if it cannot be."""
        returned = [self._returned(t) for t in (result if type(result) is tuple else (result,))]
        if self.refused:
            return None
        last = {name: i for i, (_, needed) in enumerate(self._lines) for name in needed}
        kept = {*self._parameters, *returned}
        used = [name for name in self._parameters if name in last]
        body = [f"{name}_at = {name}.data_ptr()" for name in used]
        for i, (line, needed) in enumerate(self._lines):
            body.append(line)
            # Buffers are given back as early as can be.
            gone = {name for name in needed - kept if last[name] == i}
            body += [f"del {name}" for name in sorted(gone)]
        body.append(f"return {', '.join(returned)}{',' if type(result) is tuple else ''}")
        head = f"def recipe(stream, {', '.join(self._parameters)}):"
        exec(_compiled("\n    ".join([head, *body])), self.names)
        return self.names["recipe"]

    def _returned(self, t: torch.Tensor | None) -> str:
        if t is None:
            return "None"
        name, _ = self._found(t) or ("", 0)
        self.refused |= t.numel() == 0 or self._buffers.get(name) != _looks(t)
        return name


@lru_cache(maxsize=1024)
def _compiled(text: str) -> CodeType:
    """Which takes Python longer than all the rest: 3 of 5 ms for a step, on an Arm core."""
    return compile(text, "<recipe>", "exec")


def _looks(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(t.shape), t.stride(), t.dtype


def _extent(t: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    if t.numel() == 0:
        return 0
    steps = zip(t.shape, t.stride(), strict=True)
    return t.element_size() * (1 + sum((size - 1) * stride for size, stride in steps))
