"""Enums of the public interface."""

import math
import re
from enum import Enum
from typing import NamedTuple, cast

from .errors import bad_argument

LIBRARY_NAME = "sonicmoe"  # for callers of the published package


class KernelBackendMoE(Enum):
    """Which implementation computes the layer.

    `sonicmoe` is the Triton kernels (on a GPU), `torch` is plain PyTorch (any device).
    `scattermoe` exists in the published package only: the layer raises an error that says what to
    use instead.
    """

    scattermoe = "scattermoe"
    torch = "torch"
    sonicmoe = "sonicmoe"


class Clamp(NamedTuple):
    """Constants of a clamped SwiGLU, see `ActivationType.clamped_swiglu`."""

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    def __str__(self) -> str:
        return f"limit={self.limit!r},alpha={self.alpha!r},offset={self.offset!r}"


class ActivationType(Enum):
    """Activation between the up and the down projection; the gated ones compute act(gate) · up.

    SWIGLU_CLAMPED is that of gpt-oss; `clamped_swiglu` makes others with other constants.
    """

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GEGLU_TANH = "geglu_tanh"
    REGLU = "reglu"
    SWIGLU_CLAMPED = "swiglu_clamped"

    RELU_SQ = "relu_sq"
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"

    def __init__(self, name: str) -> None:
        self.is_gated = "glu" in name  # a gated linear unit
        self.clamp = Clamp() if name == "swiglu_clamped" else None

    @classmethod
    def clamped_swiglu(
        cls, limit: float, *, alpha: float = 1.0, offset: float = 0.0
    ) -> "ActivationType":
        """(up + offset) · gate · σ(alpha · gate) after gate ≤ limit and |up| ≤ limit."""
        constants = Clamp(float(limit), float(alpha), float(offset))
        if not (constants.limit > 0 and all(map(math.isfinite, constants))):
            raise bad_argument(
                "limit, alpha and offset",
                "finite numbers, limit > 0",
                tuple(constants),
                "For no limit use ActivationType.SWIGLU.",
            )
        if constants == Clamp():
            return cls.SWIGLU_CLAMPED
        value = f"swiglu_clamped({constants})"
        member = cls._value2member_map_.get(value)
        if member is None:
            made = object.__new__(cls)
            made._name_, made._value_ = f"SWIGLU_CLAMPED({constants})", value
            made.__init__(value)  # type: ignore[misc]
            made.clamp = constants
            member = cls._value2member_map_.setdefault(value, made)  # all threads get the same
        return cast(ActivationType, member)

    @classmethod
    def _missing_(cls, value: object) -> "ActivationType | None":
        """The activation for a value made by `clamped_swiglu`, also in another process."""
        number = r"([-+.\w]+)"
        pattern = rf"swiglu_clamped\(limit={number},alpha={number},offset={number}\)"
        found = re.fullmatch(pattern, value) if isinstance(value, str) else None
        if found is None:
            return None
        limit, alpha, offset = map(float, found.groups())
        return cls.clamped_swiglu(limit, alpha=alpha, offset=offset)

    def __reduce_ex__(self, protocol: object):
        return ActivationType, (
            self.value,
        )  # by value: clamped ones are no attributes of the class

    def intermediate_size(self, columns: int) -> int:
        """I, the columns of A, for N columns of Z."""
        return columns // 2 if self.is_gated else columns


def is_glu(activation_type: ActivationType) -> bool:
    """Return `activation_type.is_gated`; for callers of the published package."""
    return activation_type.is_gated
