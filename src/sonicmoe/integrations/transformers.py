"""Hugging Face transformers: `register()`, then load with `experts_implementation=`.

transformers calls one function with the experts module, the tokens and the router's choice. The
router, the shared experts and the losses stay those of the model.
"""

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from ..enums import ActivationType
from ..errors import bad_argument
from ..functional import experts
from ..reference.activation import activate, join_gate_up

_REMEDY = "Load this model with experts_implementation='grouped_mm'."
# `ActivationType(value)` of a value that was told while compiling is an error in PyTorch 2.11.
_BY_VALUE = {a.value: a for a in ActivationType}
_activations: WeakKeyDictionary[nn.Module, ActivationType] = WeakKeyDictionary()


def register(name: str = "sonicmoe_experts") -> None:
    """Make `name` a valid `experts_implementation`, for `from_pretrained` and for
    `model.set_experts_implementation`."""
    if ALL_EXPERTS_FUNCTIONS.get(name, experts_forward) is not experts_forward:
        raise bad_argument(
            "name", "one that transformers does not use", repr(name), "Keep 'sonicmoe_experts'."
        )
    ExpertsInterface.register(name, experts_forward)


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """(T, H), (T, K), (T, K) → (T, H). Under expert parallelism, ids of experts that live elsewhere
    are outside of [0, E) and drop out."""
    if getattr(module, "has_post_expert_norm", False):
        raise bad_argument(
            "has_post_expert_norm", "False", f"True in {type(module).__name__}", _REMEDY
        )
    name = "gate_up_proj" if module.has_gate else "up_proj"
    w1, w2 = _local(module, name), _local(module, "down_proj")
    b1 = _local(module, f"{name}_bias") if module.has_bias else None
    b2 = _local(module, "down_proj_bias") if module.has_bias else None
    if module.is_transposed:
        w1, w2 = w1.mT, w2.mT
    out = experts(
        hidden_states, top_k_index, top_k_weights, w1, w2, b1, b2,
        activation=_activation(module),
        gate_up="concatenated" if module.is_concatenated else "interleaved",
    )  # fmt: skip
    return out.to(hidden_states.dtype)


def _local(module: Any, name: str) -> torch.Tensor:
    weight = getattr(module, name)
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _activation(module: Any) -> ActivationType:
    """Which of our activations is the model's, told by what it computes rather than by its name:
    models override `_apply_gate`, and two with the same `hidden_act` may clamp differently."""
    if torch.compiler.is_compiling():
        return _activation_while_compiling(module)
    if module not in _activations:
        _activations[module] = _recognise(module)
    return _activations[module]


def _activation_while_compiling(module: Any) -> ActivationType:
    """By what the layers of a model share, so that what is compiled for one of them serves all: its
    class, its configuration, and what may have been changed on the module itself. The id of a
    configuration, since PyTorch 2.11 takes no object for a constant."""
    kind, config_id = type(module), id(module.config)
    numbers = tuple(getattr(module, name) for name in _numbers(kind, config_id).split())
    act_fn = type(getattr(module, "act_fn", None))
    return _BY_VALUE[_activation_of_kind(kind, config_id, numbers, act_fn)]


@torch.compiler.assume_constant_result
def _numbers(kind: type[nn.Module], config_id: int) -> str:
    """Names of the module's own numbers, such as a gate's limit."""
    own = vars(_new(kind, config_id))
    return " ".join(name for name, value in own.items() if isinstance(value, float))


@torch.compiler.assume_constant_result
def _activation_of_kind(
    kind: type[nn.Module], config_id: int, numbers: tuple[float, ...], act_fn: type
) -> str:
    module = _new(kind, config_id)
    for name, number in zip(_numbers(kind, config_id).split(), numbers, strict=True):
        setattr(module, name, number)
    usual = type(getattr(module, "act_fn", None))
    if act_fn is not usual:
        raise bad_argument(
            "experts", f"the act_fn of their configuration, {usual.__name__}",
            f"{act_fn.__name__} in {kind.__name__}", "Do not compile them, or: " + _REMEDY,
        )  # fmt: skip
    return _recognise(module).value


def _new(kind: type[nn.Module], config_id: int) -> Any:
    with torch.device("meta"):
        return kind(ctypes.cast(config_id, ctypes.py_object).value)


@torch.no_grad()
def _recognise(module: Any) -> ActivationType:
    line = torch.linspace(-12, 12, 49, dtype=torch.float64, device="cpu")
    line = torch.cat([line, torch.tensor([-1e3, 1e3], dtype=torch.float64, device="cpu")])
    z, function = line, module.act_fn if not module.has_gate else module._apply_gate
    if module.has_gate:
        gate, up = torch.cartesian_prod(line, line).T
        z = join_gate_up(gate, up, module.is_concatenated)
    try:
        wanted = function(z[None])
    except RuntimeError:  # an activation with parameters of its own, which live on another device
        wanted = torch.full((1, 1), torch.nan, dtype=torch.float64)
    candidates = [a for a in ActivationType if a.is_gated == module.has_gate]
    for activation in candidates:
        ours = activate(z[None], activation, module.is_concatenated)
        if ours.shape == wanted.shape and torch.allclose(ours, wanted, rtol=1e-6, atol=1e-6):
            return activation
    raise bad_argument(
        "experts", "an activation among " + ", ".join(a.name for a in candidates),
        f"another one in {type(module).__name__}", _REMEDY,
    )  # fmt: skip
