"""What a call of the experts computes with: the one list of options, and their checks."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from ..enums import ActivationType
from ..errors import bad_argument
from ..ops.kinds import kind_of
from ..shapes import check_size
from ..validation import check_gate_up, parse_activation
from .fp8_weights import Fp8Weights, check_fp8_weights
from .lora import LowRank
from .memory import KEEP, MemoryPolicy, memory_policy


class OptionArguments(TypedDict, total=False):
    """Keyword arguments of `experts`, `grouped_experts` and `distributed.experts`.

    activation: of the experts, "swiglu" by default; an `ActivationType` or its value.
    gate_up: "interleaved" (g0, u0, g1, u1, …), the default, or "concatenated" rows of W1 and b1.
    precision: "fp8" runs the grouped GEMMs, backward too, in e4m3 for x in bf16: output and
    gradients then err by about 7% of their norm. "fp8_bf16_dw" computes weight gradients in bf16.
    Biases and adapters stay in bf16. H and I are multiples of 16.
    memory: "keep", "e4m3", "recompute" or a `MemoryPolicy`: what is kept for the backward pass.
    backend: "triton" or "torch"; by default the kernels on a GPU and plain PyTorch elsewhere.
    fp8_weights: an `Fp8Weights` quantizes weights for `precision="fp8"` when they change, instead
    of in every call.
    lora1, lora2: LoRA adapters of W1 and W2, which are then frozen; r numbers per row are kept for
    each.
    """

    activation: ActivationType | str
    gate_up: str
    precision: str | None
    memory: str | MemoryPolicy
    backend: str | None
    fp8_weights: Fp8Weights | None
    lora1: LowRank | None
    lora2: LowRank | None


class Options(NamedTuple):
    """The same, checked."""

    activation: ActivationType = ActivationType.SWIGLU
    gate_up: str = "interleaved"
    precision: str | None = None
    memory: MemoryPolicy = KEEP
    backend: str | None = None
    fp8_weights: Fp8Weights | None = None
    lora1: LowRank | None = None
    lora2: LowRank | None = None

    @staticmethod
    def of(given: OptionArguments) -> "Options":
        """Raise for what no layer can compute with."""
        options = Options(**given)  # type: ignore[arg-type]
        activation, gate_up, precision, memory, backend, fp8_weights, *adapters = options
        check_gate_up(gate_up)
        kind_of(precision)
        check_fp8_weights(fp8_weights, precision)
        activation = parse_activation(activation, "activation")
        # Not by `_replace`: Dynamo of PyTorch 2.11 cannot keep its result where it breaks a graph.
        policy = memory_policy(memory)
        return Options(activation, gate_up, precision, policy, backend, fp8_weights, *adapters)


# --- options of a built `MoE`: setting one takes effect or raises ---------------------------------
def check_layer_precision(precision: str | None, hidden_size: int, intermediate_size: int) -> None:
    multiple = kind_of(precision).alignment
    check_size("hidden_size", hidden_size, multiple=multiple)
    check_size("intermediate_size", intermediate_size, multiple=multiple)


def _new_precision(moe: Any, name: str, value: Any) -> Any:
    check_layer_precision(value, moe.hidden_size, moe.intermediate_size)
    return value


def _new_gate_up(moe: Any, name: str, value: Any) -> Any:
    check_gate_up(value)
    if moe.shared_expert is not None:
        moe.shared_expert.gate_up = value
    return value


def _new_activation(moe: Any, name: str, value: Any) -> Any:
    value = parse_activation(value, name)
    if value.is_gated != moe.activation_function.is_gated:
        kind = "a gated" if moe.activation_function.is_gated else "an ungated"
        remedy = "It decides the shape of c_fc.weight: build another MoE."
        raise bad_argument(name, f"{kind} activation, as the layer was built", value, remedy)
    if moe.shared_expert is not None:
        moe.shared_expert.activation = value
    return value


def _unchanged(moe: Any, name: str, value: Any) -> Any:
    if value != getattr(moe, name):
        remedy = "Router and experts were built with it: build another MoE."
        raise bad_argument(name, f"{getattr(moe, name)!r}, as the layer was built", value, remedy)
    return value


OPTIONS: dict[str, Callable[[Any, str, Any], Any]] = {
    "memory": lambda moe, name, value: memory_policy(value),
    "precision": _new_precision,
    "gate_up": _new_gate_up,
    "activation_function": _new_activation,
    **dict.fromkeys(
        ("num_experts", "top_k", "hidden_size", "intermediate_size", "router_kind"), _unchanged
    ),
}
"""What is done when an option of a built layer is set: returns the value that is kept."""
