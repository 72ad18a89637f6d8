"""What happens when an option of a built `MoE` is set: it takes effect, or it is refused."""

from collections.abc import Callable
from typing import Any

from ..errors import bad_argument
from ..shapes import check_size
from ..validation import check_gate_up, parse_activation
from .memory import memory_policy
from .operands import kind_of


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
