"""Hugging Face transformers: `register()`, then load with `experts_implementation=`.

transformers calls one function with the experts module, the tokens and the router's choice. The
router, the shared experts and the losses stay those of the model.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ..enums import ActivationType
from ..errors import bad_argument
from ..extras import missing
from ..functional import experts
from ..reference.activation import activate, join_gate_up

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
except ImportError as error:
    raise missing("transformers", "sonicmoe.integrations.transformers") from error

_REMEDY = "Load this model with experts_implementation='grouped_mm'."
# While compiling, `ActivationType(value)` of a constant result is an error in PyTorch 2.11.
_BY_VALUE = {a.value: a for a in ActivationType}
_known: "WeakKeyDictionary[nn.Module, _Known]" = WeakKeyDictionary()


def register(name: str = "sonicmoe_experts") -> None:
    """Make `name` a valid `experts_implementation` of transformers.

    Use it in `from_pretrained` or `model.set_experts_implementation`.
    """
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
    """Run the experts of a transformers module; `register` makes transformers call this.

    Under expert parallelism, ids of experts on other ranks are outside [0, E) and are dropped.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise bad_argument(
            "has_post_expert_norm", "False", f"True in {type(module).__name__}", _REMEDY
        )
    name = "gate_up_proj" if module.has_gate else "up_proj"
    w1, w2 = _local(module, name), _local(module, "down_proj")
    b1 = _local(module, f"{name}_bias") if module.has_bias else None
    b2 = _local(module, "down_proj_bias") if module.has_bias else None
    if getattr(module, "num_experts", len(w1)) != len(w1):  # ids of the others would drop out
        raise bad_argument(
            name, f"the weights of {module.num_experts} experts (num_experts)", tuple(w1.shape),
            "Change num_experts of the module together with its weights.",
        )  # fmt: skip
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
    """Which of our activations is the model's, recognised by what it computes rather than by its
    name: models override `_apply_gate`, and two with the same `hidden_act` may clamp differently.
    """
    if torch.compiler.is_compiling():
        return _activation_while_compiling(module)
    known = _known.get(module)
    if known is None or known.state != _state(module, *known.names):
        known = _Known(module)
        if known.cacheable:
            _known[module] = known
    return known.activation


class _Known:
    """The activation of a module, and everything that it was recognised from."""

    def __init__(self, module: Any) -> None:
        self.activation = _BY_VALUE[_recognise(*_evaluated(module))]
        own, act_fn = vars(module), _act_fn(module)
        self.names = (
            [name for name, value in own.items() if isinstance(value, (int, float))],
            [name for name, value in _vars(act_fn).items() if not isinstance(value, (dict, set))],
        )
        self.state = _state(module, *self.names)
        # A function of the module itself may refer to it, and would keep it alive; what a closure
        # and modules within `act_fn` depend on is not in the state.
        self.cacheable = (
            "_apply_gate" not in own
            and getattr(act_fn, "__closure__", None) is None
            and not getattr(act_fn, "_modules", None)
        )


def _state(module: Any, names: list[str], act_fn_names: list[str]) -> tuple:
    """Class, gate, `act_fn`, and the attributes of both that can change what they compute."""
    own, kind, act_fn = vars(module), type(module), _act_fn(module)
    of_act_fn = _vars(act_fn)
    return (
        kind, getattr(kind, "_apply_gate", None), act_fn,
        len(own), [own.get(name) for name in names],
        len(of_act_fn), [of_act_fn.get(name) for name in act_fn_names],
    )  # fmt: skip


def _act_fn(module: Any) -> Any:
    return getattr(module, "act_fn", None)


def _vars(thing: Any) -> dict[str, Any]:
    return getattr(thing, "__dict__", {})


def _activation_while_compiling(module: Any) -> ActivationType:
    """Let Dynamo trace the gate: it then guards everything that the gate reads, and compiles again
    when that changes. Nobody uses the traced operations, so none is left in the compiled graph."""
    for part in module.modules():
        for name in _names_in_methods(type(part)).split():
            value = getattr(part, name, None)
            if isinstance(value, float):
                value.hex()  # a float that has changed is guarded by its value only if asked for it
    return _BY_VALUE[_recognise(*_evaluated(module))]


@torch.compiler.assume_constant_result
def _names_in_methods(kind: type) -> str:
    """Every name that a method of `kind` uses: among them all attributes that its gate reads.

    Dynamo in PyTorch 2.11 cannot iterate over the attributes of a module.
    """
    own = [c for c in kind.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
    methods = [f for c in own for f in vars(c).values() if hasattr(f, "__code__")]
    return " ".join(sorted({name for f in methods for name in f.__code__.co_names}))


def _evaluated(module: Any) -> tuple[torch.Tensor, torch.Tensor | None, bool, bool, str]:
    """Points z, and what the module computes of them; None if it has parameters for that."""
    act_fn = _act_fn(module)
    z = torch.linspace(-12, 12, 49, dtype=torch.float64, device="cpu")
    z = F.pad(F.pad(z, (1, 0), value=-1e3), (0, 1), value=1e3)
    if module.has_gate:
        gate, up = torch.cartesian_prod(z, z).T
        z = join_gate_up(gate, up, module.is_concatenated)
    z, wanted = z[None], None
    if not isinstance(act_fn, nn.Module) or not [*act_fn.parameters(), *act_fn.buffers()]:
        wanted = module._apply_gate(z) if module.has_gate else act_fn(z)
    return z, wanted, module.has_gate, module.is_concatenated, type(module).__name__


@torch.compiler.assume_constant_result  # runs while Dynamo traces, on the values of the tensors
def _recognise(
    z: torch.Tensor, wanted: torch.Tensor | None, gated: bool, concatenated: bool, name: str
) -> str:
    """The value of the activation that makes `wanted` of z."""
    candidates = [a for a in ActivationType if a.is_gated == gated]
    for activation in candidates:
        ours = activate(z, activation, concatenated)
        if wanted is None or wanted.shape != ours.shape:
            continue
        if torch.allclose(ours, wanted, rtol=1e-6, atol=1e-6):
            return activation.value
    raise bad_argument(
        "experts", "an activation among " + ", ".join(a.name for a in candidates),
        f"another one in {name}", _REMEDY,
    )  # fmt: skip
