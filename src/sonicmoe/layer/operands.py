"""The interface between the layer's statements and its arithmetic.

A kind of operands owns up, down, their gradients, and what is kept for them. `register` gives it a
name, which every entry point accepts as `precision`.
"""

from typing import Any, NamedTuple

import torch

from ..enums import ActivationType
from ..errors import bad_argument
from ..tensors import NO_LORA, Lora, Permutation
from .main_grad import WithMainGrad
from .weights import ExpertWeights, Projection


class How(NamedTuple):
    """How one call computes."""

    precision: str | None
    activation: ActivationType
    gate_up: str
    backward: bool  # whether a backward pass can follow; else nothing is kept
    z_dtype: torch.dtype | None  # of Z as it is kept; None: it is not
    recompute: bool  # Z is computed again in the backward pass
    keep_transposes: bool  # of FP8 weights, for the backward pass
    slices: int  # of H, in which Y and the rows of dX exist
    backend: str


class Forward(NamedTuple):
    """What up returns, as tuples of the kind's own: A for down, and what dZ needs, if it is kept.

    `u` is X A1ᵀ (R, r) where W1 has a LoRA adapter.
    """

    rows: Any
    kept: Any
    u: torch.Tensor | None


class Gradient(NamedTuple):
    """How the gradient of a weight is returned: added to its `main_grad`, or new, maybe in fp32."""

    main: WithMainGrad | None
    fp32: bool


class Gradients(NamedTuple):
    """The gradients of one projection and of its input: X for up, the scores for down.

    Also which of them are needed.
    """

    source: Any
    weight: Any
    bias: Any
    lora_a: Any
    lora_b: Any

    @property
    def lora(self) -> bool:
        return bool(self.lora_a or self.lora_b)


class Source(NamedTuple):
    """What up is computed from, once more if `How.recompute`."""

    x: torch.Tensor
    operand: Any
    bias: torch.Tensor | None
    u: torch.Tensor | None
    lora_b: torch.Tensor | None

    @property
    def lora(self) -> Lora:
        return NO_LORA if self.u is None else Lora(self.u, self.lora_b)


class Operands:
    """One kind of operands. Tensors in its own named tuples carry no gradient, except dZ."""

    Dz: type  # named tuple: dZ on its way from Down to Up
    alignment = 8  # H and I are multiples of it

    @staticmethod
    def check(x: torch.Tensor, weights: ExpertWeights, backend: str) -> str:
        """Raise a ValueError for what this kind cannot compute; the backend that computes it."""
        return backend

    @staticmethod
    def operands(
        weights: ExpertWeights, x: torch.Tensor, how: How, fp8_weights: Any
    ) -> tuple[Any, Any]:
        """W1 and W2 as the GEMMs take them. `fp8_weights` are the caller's, or None."""
        raise NotImplementedError

    @staticmethod
    def kept_operand(operand: Any, how: How) -> Any:
        """What of an operand is kept for the backward pass."""
        return operand

    @staticmethod
    def up(x: torch.Tensor, w: Projection, operand: Any, p: Permutation, how: How) -> Forward:
        raise NotImplementedError

    @staticmethod
    def low_rank(rows: Any, lora_a: torch.Tensor, p: Permutation, how: How) -> torch.Tensor:
        """A A2ᵀ (R, r)."""
        raise NotImplementedError

    @staticmethod
    def down(
        rows: Any, operand: Any, w: Projection, u: torch.Tensor | None,
        scores: torch.Tensor | None, p: Permutation, tokens: int, how: How,
    ) -> torch.Tensor:  # fmt: skip
        """The output (T, H), or (R, H) for rows that arrived sorted."""
        raise NotImplementedError

    @staticmethod
    def dz_like(x: torch.Tensor, shape: torch.Size, p: Permutation, how: How) -> Any:
        """A `Dz` of placeholders for W1 of this shape."""
        raise NotImplementedError

    @staticmethod
    def dz_needed(needs: Gradients, how: How) -> Any:
        """A `Dz` of bools: what Up's gradients are computed from."""
        raise NotImplementedError

    @staticmethod
    def recomputed(dout: torch.Tensor, source: Source, p: Permutation, how: How) -> Any:
        """`Forward.kept` once more. `dout` tells a compiler that this is the backward pass."""
        raise NotImplementedError

    @staticmethod
    def down_backward(
        dout: torch.Tensor, kept: Any, operand: Any, w: Projection, u: torch.Tensor | None,
        scores: torch.Tensor | None, p: Permutation, needs: Gradients, dz: Any,
        gradient: Gradient, how: How,
    ) -> tuple[Gradients, Any]:  # fmt: skip
        """Gradients and a `Dz`; of that what `dz`, a `Dz` of bools, says."""
        raise NotImplementedError

    @staticmethod
    def up_backward(
        dz: Any, source: Source, lora_a: torch.Tensor | None, p: Permutation, needs: Gradients,
        gradient: Gradient, how: How,
    ) -> Gradients:  # fmt: skip
        raise NotImplementedError


_kinds: dict[str | None, type[Operands]] = {}


def register(name: str | None, kind: type[Operands]) -> None:
    """Make `name` a valid `precision`."""
    _kinds[name] = kind


def precisions() -> list[str]:
    return [name for name in _kinds if name is not None]


def kind_of(precision: str | None) -> type[Operands]:
    if precision not in _kinds:
        raise bad_argument(
            "precision",
            f"{', '.join(map(repr, precisions()))} or None",
            repr(precision),
            "None computes in the dtype of the data.",
        )
    return _kinds[precision]
