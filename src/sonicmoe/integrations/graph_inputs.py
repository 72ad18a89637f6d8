"""The arguments of a call as `cuda_graphs` compares them: tensors, and all else by its value."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import bad_argument

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)


class Call:
    """The tensors of a call in order, and a key that is equal for calls that one graph serves."""

    __slots__ = ("key", "tensors")

    def __init__(self, args: Sequence, kwargs: dict[str, Any]) -> None:
        tensors: list[torch.Tensor] = []
        key: list[tuple] = []
        for a in args:
            if isinstance(a, torch.Tensor):
                tensors.append(a)
                key.append((a.shape, a.dtype, a.device))
            else:
                key.append((type(a), _comparable(a)))
        for name in sorted(kwargs):
            a = kwargs[name]
            if isinstance(a, torch.Tensor):
                tensors.append(a)
                key.append((name, a.shape, a.dtype, a.device))
            else:
                key.append((name, type(a), _comparable(a)))
        self.tensors, self.key = tensors, tuple(key)


def _comparable(a: Any) -> Any:
    """`a`, or of what cannot be captured something that equals nothing else."""
    return a if isinstance(a, _CONSTANTS) else object()


class Inputs:
    """The arguments of a sample."""

    def __init__(self, args: Sequence, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = tuple(args), {name: kwargs[name] for name in sorted(kwargs)}

    @property
    def key(self) -> tuple:
        return Call(self.args, self.kwargs).key

    def named(self) -> Iterator[tuple[str, Any]]:
        for place, a in enumerate(self.args):
            yield f"argument {place}", a
        yield from self.kwargs.items()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, a) for name, a in self.named() if isinstance(a, torch.Tensor))

    def size(self) -> int:
        return sum(t.numel() for _, t in self.tensors())

    def without_tensors(self) -> "Inputs":
        """The same arguments with places for tensors, so that those of a sample may be freed."""

        def place(a: Any) -> Any:
            return _PLACE if isinstance(a, torch.Tensor) else a

        return Inputs(
            [place(a) for a in self.args], {name: place(a) for name, a in self.kwargs.items()}
        )

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[list, dict[str, Any]]:
        """args and kwargs with `tensors` in their places."""
        rest = iter(tensors)
        args = [next(rest) if a is _PLACE else a for a in self.args]
        return args, {name: next(rest) if a is _PLACE else a for name, a in self.kwargs.items()}


_PLACE = object()


def as_inputs(sample: Any) -> Inputs:
    """A tensor, a tuple of arguments or a dict of keyword arguments as `Inputs`."""
    if isinstance(sample, torch.Tensor):
        sample = (sample,)
    if not isinstance(sample, tuple | dict):
        remedy = "Pass for example (x,) or {'input_ids': ids}."
        expected = "a tensor, a tuple of arguments or a dict of keyword arguments"
        raise bad_argument("samples", expected, type(sample).__name__, remedy)
    inputs = Inputs((), sample) if isinstance(sample, dict) else Inputs(sample, {})
    for name, a in inputs.named():
        if not isinstance(a, (torch.Tensor, *_CONSTANTS)):
            expected = "a tensor, None, a number, a string or a dtype"
            remedy = "Wrap the module in one that takes tensors."
            raise bad_argument(name, expected, type(a).__name__, remedy)
    if not any(inputs.tensors()):
        raise bad_argument("samples", "a tensor in each", "none", "Pass what the call passes.")
    return inputs


def in_words(inputs: Inputs) -> str:
    """For example `input_ids (2, 512) int64, use_cache=False`."""
    words = []
    for name, a in inputs.named():
        if isinstance(a, torch.Tensor):
            gradient = ", requires_grad" if a.requires_grad else ""
            dtype = str(a.dtype).removeprefix("torch.")
            words.append(f"{name} {tuple(a.shape)} {dtype}{gradient} on {a.device}")
        else:
            words.append(f"{name}={a!r}")
    return ", ".join(words)
