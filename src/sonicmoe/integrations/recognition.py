"""Which experts of transformers we recognise, and which of our activations they compute.

Found by evaluating the module's gate on a grid of numbers, not by its name: models override
`_apply_gate`, and two with the same `hidden_act` may clamp differently.
"""

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from ..enums import ActivationType
from ..errors import bad_argument
from ..reference.activation import activate, join_gate_up

_REMEDY = "Load this model with experts_implementation='grouped_mm'."
_FAR = 1e6  # beyond every limit that a gate may have
_BY_VALUE = {a.value: a for a in ActivationType}
_known: "WeakKeyDictionary[nn.Module, _Known]" = WeakKeyDictionary()


def activation_of(module: Any) -> ActivationType:
    """The activation of an experts module of transformers; raises a ValueError for others."""
    if torch.compiler.is_compiling():
        return _activation_while_compiling(module)
    known = _known.get(module)
    if known is None or known.state != _state(module, *known.names):
        known = _Known(module)
        if known.cacheable:
            _known[module] = known
    return known.activation


def gate_up_of(module: Any) -> str:
    """The order of gate and up columns, as `experts` takes it."""
    return "concatenated" if module.is_concatenated else "interleaved"


class _Known:
    """The activation of a module, and everything that determined it."""

    def __init__(self, module: Any) -> None:
        self.activation = ActivationType(_recognise(*_evaluated(module)))
        own, act_fn = vars(module), _act_fn(module)
        parts = [*act_fn.modules()] if isinstance(act_fn, nn.Module) else [act_fn]
        self.names = (
            [name for name, value in own.items() if isinstance(value, (int, float))],
            [(part, _names_of_values(part)) for part in parts],
        )
        self.state = _state(module, *self.names)
        # A function of the module itself may refer to it, and would keep it alive; what a closure
        # depends on is not in the state.
        self.cacheable = "_apply_gate" not in own and getattr(act_fn, "__closure__", None) is None


def _state(module: Any, names: list[str], parts: list[tuple[Any, list[str]]]) -> tuple:
    """Class, gate, `act_fn`, and the attributes of the module, of `act_fn` and of the modules in it
    that can change what they compute."""
    own, kind = vars(module), type(module)
    of_parts = [
        (len(values := _vars(part)), [values.get(name) for name in part_names],
         [*values.get("_modules", {}).values()])
        for part, part_names in parts
    ]  # fmt: skip
    return (
        kind, getattr(kind, "_apply_gate", None), _act_fn(module),
        len(own), [own.get(name) for name in names], of_parts,
    )  # fmt: skip


def _names_of_values(part: Any) -> list[str]:
    return [name for name, value in _vars(part).items() if not isinstance(value, (dict, set))]


def _act_fn(module: Any) -> Any:
    return getattr(module, "act_fn", None)


def _vars(thing: Any) -> dict[str, Any]:
    return getattr(thing, "__dict__", {})


def _activation_while_compiling(module: Any) -> ActivationType:
    """Let Dynamo trace the gate: it then guards everything that the gate reads, and compiles again
    when that changes. The results are unused, so the compiled graph does not contain them."""
    for part in module.modules():
        for name in _names_in_methods(type(part)).split():
            value = getattr(part, name, None)
            if isinstance(value, float):
                value.hex()  # else Dynamo does not guard the value of a float that has changed
    # `ActivationType(value)` of a constant result is an error in PyTorch 2.11.
    return _BY_VALUE[_recognise(*_evaluated(module))]


@torch.compiler.assume_constant_result
def _names_in_methods(kind: type) -> str:
    """Every name that a method of `kind` uses: among them all attributes that its gate reads.

    Dynamo in PyTorch 2.11 cannot iterate over the attributes of a module.
    """
    own = [c for c in kind.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
    methods = [f for c in own for f in vars(c).values() if hasattr(f, "__code__")]
    return " ".join(sorted({name for f in methods for name in f.__code__.co_names}))


def _evaluated(module: Any) -> tuple[torch.Tensor, torch.Tensor | None, bool, str, str]:
    """Points z, and the module's results for them; None if its activation has parameters."""
    act_fn = _act_fn(module)
    z = torch.linspace(-12, 12, 49, dtype=torch.float64, device="cpu")
    z = F.pad(F.pad(z, (1, 0), value=-_FAR), (0, 1), value=_FAR)
    if module.has_gate:
        gate, up = torch.cartesian_prod(z, z).T
        z = join_gate_up(gate, up, gate_up_of(module))
    z, wanted = z[None], None
    if not isinstance(act_fn, nn.Module) or not [*act_fn.parameters(), *act_fn.buffers()]:
        wanted = module._apply_gate(z) if module.has_gate else act_fn(z)
    return z, wanted, module.has_gate, gate_up_of(module), type(module).__name__


@torch.compiler.assume_constant_result  # runs while Dynamo traces, on the values of the tensors
def _recognise(
    z: torch.Tensor, wanted: torch.Tensor | None, gated: bool, gate_up: str, name: str
) -> str:
    """The value of the activation that maps z to `wanted`."""
    ours = [a for a in ActivationType if a.is_gated == gated]
    others = [] if wanted is None or not gated else _with_constants(wanted)
    for activation in ours + others:
        got = activate(z, activation, gate_up)
        if wanted is None or wanted.shape != got.shape:
            continue
        if torch.allclose(got, wanted, rtol=1e-6, atol=1e-6):
            _BY_VALUE[activation.value] = activation
            return activation.value
    names = [a.name for a in ours] + ["clamped SwiGLU", "soft-capped SwiGLU"] * gated
    expected = "an activation among " + ", ".join(names)
    raise bad_argument("experts", expected, f"another one in {name}", _REMEDY)


def _with_constants(wanted: torch.Tensor) -> list[ActivationType]:
    """Activations with constants that `wanted` may be; the caller compares the rest of the grid."""
    if wanted.numel() != 51 * 51:
        return []
    grid = wanted.view(51, 51).tolist()
    zero, half, last = 25, 26, -1  # indices of 0, 0.5 and _FAR
    of_half = [grid[half][up] for up in (zero, half, last)]
    return _clamped(*of_half) + _soft_capped(of_half[1] / (of_half[2] or 1.0), grid[last][last])


def _clamped(zero: float, half: float, last: float) -> list[ActivationType]:
    """From the values for a gate of 0.5 and three ups. Below the limit a clamped SwiGLU is
    (up + offset) · h, where h = gate · σ(alpha · gate)."""
    h = 2 * (half - zero)
    if not 0 < h < 0.5:
        return []
    constants = last / h - zero / h, 2 * math.log(2 * h / (1 - 2 * h)), zero / h
    limit, alpha, offset = (_shorter(c, 9) for c in constants)
    if not 0 < limit < _FAR:
        return []
    return [ActivationType.clamped_swiglu(limit, alpha=alpha, offset=offset)]


def _soft_capped(ratio: float, largest: float) -> list[ActivationType]:
    """From tanh(0.5 / up_cap), what an up of 0.5 has of the value of a large one, and from
    gate_cap · up_cap, the value where gate and up are large."""
    if not 0 < ratio < 1:
        return []
    up_cap = 0.5 / math.atanh(ratio)
    caps = [_shorter(cap, 6) for cap in (largest / up_cap, up_cap)]  # Inkling 2 computes in fp32
    if not all(0 < cap < _FAR / 2 for cap in caps):
        return []
    return [ActivationType.soft_capped_swiglu(*caps)]


def _shorter(constant: float, digits: int) -> float:
    """10.0, not 9.9999999999999."""
    return float(f"{constant:.{digits}g}")
