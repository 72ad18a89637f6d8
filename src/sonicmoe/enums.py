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


class SoftCaps(NamedTuple):
    """Constants of a soft-capped SwiGLU, see `ActivationType.soft_capped_swiglu`."""

    gate: float
    up: float


class ActivationType(Enum):
    """Activation between the up and the down projection; the gated ones compute act(gate) · up.

    SWIGLU_CLAMPED is that of gpt-oss; `clamped_swiglu` makes others with other constants, and
    `soft_capped_swiglu` that of Inkling 2.
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
        self.soft_caps: SoftCaps | None = None

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
        return cls.SWIGLU_CLAMPED if constants == Clamp() else cls._with(constants)

    @classmethod
    def soft_capped_swiglu(cls, gate_cap: float, up_cap: float) -> "ActivationType":
        """cap(gate) · σ(gate) · cap(up), where cap(x) is cap · tanh(x / cap)."""
        constants = SoftCaps(float(gate_cap), float(up_cap))
        if not all(0 < cap < math.inf for cap in constants):
            raise bad_argument(
                "gate_cap and up_cap",
                "finite numbers > 0",
                tuple(constants),
                "For no caps use ActivationType.SWIGLU.",
            )
        return cls._with(constants)

    @classmethod
    def _with(cls, constants: Clamp | SoftCaps) -> "ActivationType":
        kind = "clamped" if isinstance(constants, Clamp) else "soft_capped"
        given = ",".join(f"{name}={number!r}" for name, number in constants._asdict().items())
        value = f"swiglu_{kind}({given})"
        member = cls._value2member_map_.get(value)
        if member is None:
            made = object.__new__(cls)
            made._name_, made._value_ = f"SWIGLU_{kind.upper()}({given})", value
            made.__init__(value)  # type: ignore[misc]
            if isinstance(constants, Clamp):
                made.clamp = constants
            else:
                made.soft_caps = constants
            member = cls._value2member_map_.setdefault(value, made)  # all threads get the same
        return cast(ActivationType, member)

    @classmethod
    def _missing_(cls, value: object) -> "ActivationType | None":
        """The activation for a value made by `_with`, also in another process."""
        number = r"([-+.\w]+)"
        clamped = rf"swiglu_clamped\(limit={number},alpha={number},offset={number}\)"
        soft_capped = rf"swiglu_soft_capped\(gate={number},up={number}\)"
        if found := re.fullmatch(clamped, str(value)):
            limit, alpha, offset = map(float, found.groups())
            return cls.clamped_swiglu(limit, alpha=alpha, offset=offset)
        if found := re.fullmatch(soft_capped, str(value)):
            return cls.soft_capped_swiglu(*map(float, found.groups()))
        return None

    def __reduce_ex__(self, protocol: object):
        # By value: those with constants are no attributes of the class.
        return ActivationType, (self.value,)

    def intermediate_size(self, columns: int) -> int:
        """I, the columns of A, for N columns of Z."""
        return columns // 2 if self.is_gated else columns


def is_glu(activation_type: ActivationType) -> bool:
    """Return `activation_type.is_gated`; for callers of the published package."""
    return activation_type.is_gated
