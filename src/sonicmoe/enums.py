"""Enums of the public interface."""

from enum import Enum

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


class ActivationType(Enum):
    """Activation between the up and the down projection; the gated ones compute act(gate) · up."""

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


def is_glu(activation_type: ActivationType) -> bool:
    """Return `activation_type.is_gated`; for callers of the published package."""
    return activation_type.is_gated
