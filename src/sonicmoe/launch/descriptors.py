"""TMA descriptors: how a tensor is cut into boxes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

_kinds: dict[tuple, object] = {}


class Boxes:
    """How TMA cuts a tensor into boxes: everything in a descriptor but its address.

    `launch` takes a descriptor as (tensor, Boxes). Boxes are cached by shape, because building a
    Triton descriptor takes longer than a launch.
    """

    __slots__ = ("block", "kind", "layout", "shape", "strides", "values")

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int],
        block: Sequence[int],
        layout: Any = None,
    ) -> None:
        self.shape, self.strides, self.block = list(shape), list(strides), list(block)
        self.layout = layout
        # One object for (dtype, block), which is faster to hash.
        self.kind = _kinds.setdefault((dtype, *block), object())
        self.values = (*shape, *strides)  # what a compiled kernel takes after the descriptor

    def of(self, t: torch.Tensor) -> Any:
        """The descriptor of `t` for a launch by Triton itself; Gluon's if there is a layout."""
        if self.layout is None:
            return TensorDescriptor(t, self.shape, self.strides, self.block)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Gluon

        return Gluon(t, self.shape, self.strides, self.block, self.layout)


@lru_cache(maxsize=1024)
def _boxes(dtype, shape, strides, block) -> Boxes:
    return Boxes(dtype, shape, strides, block)


def descriptor(t: torch.Tensor, block: list[int]) -> tuple[torch.Tensor, Boxes]:
    return t, _boxes(t.dtype, t.shape, t.stride(), tuple(block))


def weight_layout(w: torch.Tensor) -> str:
    """How (E, N, K) weights lie in memory: "nk" as (E, N, K), "kn" as (E, K, N)."""
    return "nk" if w.stride(2) == 1 else "kn"
