"""TMA descriptors: how a tensor is cut into boxes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

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
