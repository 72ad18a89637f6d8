"""Activations and their derivatives, elementwise, in the accuracy of their arguments."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..enums import ActivationType, Clamp

CLAMP_LIMIT = Clamp().limit  # gpt-oss: gate at most 7, up within ±7


def _erf_gelu_slope(g: torch.Tensor) -> torch.Tensor:
    cdf = 0.5 * (1 + torch.erf(g / math.sqrt(2)))
    return cdf + g * torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)


def _tanh_gelu_slope(g: torch.Tensor) -> torch.Tensor:
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (g + 0.044715 * g**3))
    return 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * c * (1 + 3 * 0.044715 * g * g)


def _silu_slope(g: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(g)
    return s * (1 + g * (1 - s))


# name -> (value, slope) of the function of one variable behind it
_Elementwise = Callable[[torch.Tensor], torch.Tensor]
_UNARY: dict[str, tuple[_Elementwise, _Elementwise]] = {
    "silu": (F.silu, _silu_slope),
    "gelu": (F.gelu, _erf_gelu_slope),
    "gelu_tanh": (lambda g: F.gelu(g, approximate="tanh"), _tanh_gelu_slope),
    "relu": (F.relu, lambda g: (g > 0).to(g.dtype)),
    "relu_sq": (lambda g: F.relu(g) ** 2, lambda g: 2 * F.relu(g)),
}
_GATE = {
    ActivationType.SWIGLU: "silu",
    ActivationType.GEGLU: "gelu",
    ActivationType.GEGLU_TANH: "gelu_tanh",
    ActivationType.REGLU: "relu",
}


def split_gate_up(z: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate and the up columns of Z (…, 2I), which are "interleaved" or "concatenated"."""
    if gate_up == "concatenated":
        gate, up = z.chunk(2, dim=-1)
        return gate, up
    gate, up = z.unflatten(-1, (-1, 2)).unbind(-1)  # backward is one stack, of slices it is five
    return gate, up


def join_gate_up(gate: torch.Tensor, up: torch.Tensor, gate_up: str) -> torch.Tensor:
    """The inverse of `split_gate_up`."""
    if gate_up == "concatenated":
        return torch.cat([gate, up], dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)


def _clamped(
    gate: torch.Tensor, up: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slope at a limit is one, as in the kernels; of PyTorch's clamp it is zero since 2.15."""
    gate = torch.where(gate > limit, limit, gate)
    up = torch.where(up > limit, limit, up)
    return gate, torch.where(up < -limit, -limit, up)


def _soft_capped(x: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cap · tanh(x / cap) and its slope."""
    t = torch.tanh(x / cap)
    return cap * t, 1 - t * t


def activate(z: torch.Tensor, activation: ActivationType, gate_up: str) -> torch.Tensor:
    """A = act(Z)."""
    if not activation.is_gated:
        return _UNARY[activation.value][0](z)
    gate, up = split_gate_up(z, gate_up)
    if activation.clamp:
        limit, alpha, offset = activation.clamp
        gate, up = _clamped(gate, up, limit)
        return (up + offset) * gate * torch.sigmoid(alpha * gate)
    if activation.soft_caps:
        (g, _), (u, _) = map(_soft_capped, (gate, up), activation.soft_caps)
        return g * torch.sigmoid(gate) * u
    return _UNARY[_GATE[activation]][0](gate) * up


def activate_backward(
    z: torch.Tensor, da: torch.Tensor, activation: ActivationType, gate_up: str
) -> torch.Tensor:
    """dZ = act'(Z)·dA."""
    if not activation.is_gated:
        return _UNARY[activation.value][1](z) * da
    gate, up = split_gate_up(z, gate_up)
    if activation.clamp:
        limit, alpha, offset = activation.clamp
        g, u = _clamped(gate, up, limit)
        s = torch.sigmoid(alpha * g)
        d_gate = (u + offset) * s * (1 + alpha * g * (1 - s)) * (gate <= limit)
        d_up = g * s * (up.abs() <= limit)
    elif activation.soft_caps:
        (g, g_slope), (u, u_slope) = map(_soft_capped, (gate, up), activation.soft_caps)
        s = torch.sigmoid(gate)
        d_gate = u * s * (g_slope + g * (1 - s))
        d_up = g * s * u_slope
    else:
        value, slope = _UNARY[_GATE[activation]]
        d_gate, d_up = slope(gate) * up, value(gate)
    return join_gate_up(d_gate * da, d_up * da, gate_up)
