"""The arithmetic of the experts, a class for each precision: the bodies of the operators in
`experts`.

`register` gives a class a name, which every entry point accepts as `precision`.
"""

from typing import Any, NamedTuple

import torch

from ..enums import ActivationType
from ..errors import bad_argument
from ..tensors import Dz, Kept, Linear, Needs, Permutation, Rows, Weight
from .lora import adapter, gathered_low_rank
from .registry import stages


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
    """What `up` returns: A (R, I) for down, the fields of `Kept` if it is kept, and U1 = X A1ᵀ and
    U2 = A A2ᵀ (R, r) of the LoRA adapters."""

    a: torch.Tensor
    a_scale: torch.Tensor | None
    z: torch.Tensor | None
    z_scale: torch.Tensor | None
    zmax_columns: torch.Tensor | None
    x_scale: torch.Tensor | None
    u1: torch.Tensor | None
    u2: torch.Tensor | None

    @property
    def rows(self) -> Rows:
        return Rows(self.a, self.a_scale)

    @property
    def kept(self) -> Kept:
        if self.z is None:
            return Kept()
        return Kept(self.z, self.z_scale, self.zmax_columns, self.a_scale, self.x_scale)


class Gradients(NamedTuple):
    """The gradients of one projection and of its input, X or the scores; None if not needed."""

    source: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None


class Source(NamedTuple):
    """What up was computed from; `u` is U1 of `Forward`."""

    x: torch.Tensor
    w: Linear
    u: torch.Tensor | None


class Kind:
    """One precision. Tensors in named tuples carry no gradient, except dZ."""

    alignment = 8  # H and I are multiples of it
    module = "grouped_gemm"  # in `launch` and `reference`

    @staticmethod
    def check(x: torch.Tensor, weights: Any, backend: str) -> str:
        """Raise a ValueError for what this kind cannot compute; the backend that computes it."""
        return backend

    @staticmethod
    def weights(w1: Weight, w2: Weight, x: torch.Tensor, how: How, kept: Any) -> tuple:
        """W1 and W2 as the GEMMs take them. `kept` are the caller's `Fp8Weights`, or None."""
        raise NotImplementedError

    @staticmethod
    def kept_weight(w: Weight, how: How) -> Weight:
        """What of a weight is kept for the backward pass."""
        return w

    @classmethod
    def up(
        cls, x: torch.Tensor, w: Linear, next_lora_a: torch.Tensor | None, p: Permutation, how: How
    ) -> Forward:
        """`next_lora_a` is that of W2."""
        u = gathered_low_rank(x, w.lora_a, p, how.backend)
        found = cls.forward(x, w, u, p, how, how.z_dtype)
        if next_lora_a is None:
            return found
        return found._replace(u2=cls.low_rank(found.rows, next_lora_a, p, how))

    @staticmethod
    def forward(
        x: torch.Tensor, w: Linear, u: torch.Tensor | None, p: Permutation, how: How, z_dtype: Any
    ) -> Forward:
        """`up` without U2; also Z once more."""
        raise NotImplementedError

    @staticmethod
    def forward_like(
        x: torch.Tensor, w: Linear, next_lora_a: torch.Tensor | None, p: Permutation, how: How
    ) -> Forward:
        """The shapes and dtypes of `up`."""
        raise NotImplementedError

    @staticmethod
    def low_rank(rows: Rows, lora_a: torch.Tensor, p: Permutation, how: How) -> torch.Tensor:
        """A A2ᵀ (R, r)."""
        raise NotImplementedError

    @classmethod
    def down(
        cls, rows: Rows, w: Linear, u: torch.Tensor | None, scores: torch.Tensor | None,
        p: Permutation, tokens: int, how: How,
    ) -> torch.Tensor:  # fmt: skip
        """The output (T, H), or (R, H) for rows that arrived sorted."""
        gemms, lora = stages(how.backend, cls.module), adapter(u, w.lora_b)
        given = (*(rows[:1] if rows.scale is None else rows), w.weight, w.bias)
        if not p.is_gathered:
            return gemms.down(*given, scores, lora, p)
        if how.slices > 1:
            return gemms.down_and_combine(*given, scores, lora, p, tokens, how.slices)
        y = gemms.down(*given, None, lora, p)
        return gemms.combine(y, scores, p.slot_row, p.token_start, tokens)

    @classmethod
    def recomputed(cls, dout: torch.Tensor, source: Source, p: Permutation, how: How) -> Kept:
        x, w, u = source
        return cls.forward(x, w, u, p, how, x.dtype).kept

    @staticmethod
    def dz_like(new: Any, rows: int, experts: int, n: int) -> Dz:
        """dZ as `new(*shape, dtype=…)` makes tensors; the dtype is that of the data by default."""
        raise NotImplementedError

    @staticmethod
    def dz_needed(needs: Needs) -> tuple[bool, bool]:
        """Whether up's gradients are computed from dZ and from dZᵀ."""
        raise NotImplementedError

    @classmethod
    def down_backward(
        cls, dout: torch.Tensor, kept: Kept, w: Linear, u: torch.Tensor | None,
        scores: torch.Tensor | None, p: Permutation, needs: Needs, dz: bool, dz_t: bool,
        main_grad: torch.Tensor | None, fp32: bool, how: How,
    ) -> tuple[Gradients, Dz]:  # fmt: skip
        """The gradient of the weight is added to `main_grad`, or new, in fp32 if `fp32`."""
        raise NotImplementedError

    @classmethod
    def up_backward(
        cls, dz: Dz, source: Source, p: Permutation, needs: Needs,
        main_grad: torch.Tensor | None, fp32: bool, how: How,
    ) -> Gradients:  # fmt: skip
        raise NotImplementedError


def weight_gradient(
    gemms: Any, left: Any, right: Any, like: Any, p: Permutation, gathered: str,
    main_grad: torch.Tensor | None, fp32: bool,
) -> torch.Tensor | None:  # fmt: skip
    """Σ over an expert's rows of leftᵀ right, with the strides of `like`; None if it was added to
    `main_grad`."""
    if main_grad is None:
        return gemms.weight_gradient(left, right, like, p, gathered, fp32)
    gemms.weight_gradient_into(main_grad, left, right, p, gathered)
    return None


_kinds: dict[str | None, type[Kind]] = {}


def register(name: str | None, kind: type[Kind]) -> None:
    """Make `name` a valid `precision`."""
    _kinds[name] = kind


def precisions() -> list[str]:
    return [name for name in _kinds if name is not None]


def kind_of(precision: str | None) -> type[Kind]:
    if precision not in _kinds:
        raise bad_argument(
            "precision",
            f"{', '.join(map(repr, precisions()))} or None",
            repr(precision),
            "None computes in the dtype of the data.",
        )
    return _kinds[precision]
