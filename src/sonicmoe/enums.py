"""The names a caller chooses from."""

from enum import Enum


class KernelBackendMoE(Enum):
    """Which implementation computes the layer.

    `sonicmoe` is the Triton kernels (a GPU), `torch` is plain PyTorch (any device). `scattermoe` is
    a name of the published interface; the layer answers it with an error that says what to use.
    """

    scattermoe = "scattermoe"
    torch = "torch"
    sonicmoe = "sonicmoe"


class ActivationType(Enum):
    """What stands between the two products. A gated one takes a gate and an up half."""

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
    """The published name of `ActivationType.is_gated`."""
    return activation_type.is_gated
