"""Activations as device functions, passed to kernels as constexpr arguments.

An activation is a pair of functions in fp32:

- gated: `f(gate, up) -> a` and `df(gate, up, da) -> a, dgate, dup`,
- plain: `f(z) -> a` and `df(z, da) -> a, dz`.

The derivative also returns the value, because the backward pass computes A again from Z.
"""

from functools import cache
from types import FunctionType

import torch
import triton
import triton.language as tl

from ..enums import ActivationType, Clamp, SoftCaps

_PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
_LOG2E = tl.constexpr(1.4426950408889634)
_GELU_LINEAR = tl.constexpr(1.5957691216057308)  # √(8/π)
_GELU_CUBIC = tl.constexpr(1.5957691216057308 * 0.044715)
_CLAMP_LIMIT = tl.constexpr(Clamp().limit)
_CLAMP_ALPHA = tl.constexpr(Clamp().alpha)
_CLAMP_OFFSET = tl.constexpr(Clamp().offset)
_GATE_CAP = _UP_CAP = tl.constexpr(1.0)
_BITS = tl.constexpr(32)


@triton.jit
def _reciprocal(x):
    """1/x in one instruction: zero above 2¹²⁶, which a division handles in four more."""
    if _PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _sigmoid(x):
    return _reciprocal(1.0 + tl.exp2(-_LOG2E * x))


@triton.jit
def _normal(x):
    """Φ(x) and φ(x): the normal distribution function and its density.

    Below zero Φ is exp(−x²/2) times a polynomial in 1/(1 + 0.3·|x|), fitted to a relative error of
    8e-8. That is as exact as (1 + erf(x/√2))/2 in fp32, and stays exact far below zero. With the
    library's erf, `up` with GELU has 165 KB of instructions, more than the instruction cache.
    """
    bell = tl.exp2(-0.5 * _LOG2E * x * x)
    t = _reciprocal(1.0 + 0.3 * tl.abs(x))
    p = -0.060927987 + t * (0.21414153 + t * (-0.16168426 + t * 0.036742743))
    p = t * (0.11961626 + t * (0.12094928 + t * (0.098717906 + t * (0.13244447 + t * p))))
    tail = p * bell
    return tl.abs(tl.where(x > 0, 1.0, 0.0) - tail), 0.3989422804014327 * bell


# --- functions of one variable: value, and value with slope ---------------------------------------
@triton.jit
def _silu(x):
    s = _sigmoid(x)
    value = x * s
    return value, s + value * (1.0 - s)


@triton.jit
def _gelu(x):
    below, density = _normal(x)
    return x * below, below + x * density


@triton.jit
def _gelu_tanh(x):
    """x·σ(v) with v = √(8/π)·(x + 0.044715·x³), since (1 + tanh(v/2))/2 = σ(v).

    σ(v) and σ(−v) both come from e^−|v|: the smaller one, as 1 minus the other, would lose its
    digits, and the slope err by 2e-6 in fp32. With tanh dZ also has 6 to 12% more instructions.
    """
    square = x * x
    e = tl.exp2(-_LOG2E * tl.abs(x * (_GELU_LINEAR + _GELU_CUBIC * square)))
    larger = _reciprocal(1.0 + e)
    smaller = e * larger
    s = tl.where(x > 0, larger, smaller)
    other = tl.where(x > 0, smaller, larger)
    value = x * s
    return value, s + value * other * (_GELU_LINEAR + 3.0 * _GELU_CUBIC * square)


@triton.jit
def _relu(x):
    # x != x keeps NaN, which a maximum would drop.
    positive = (x > 0) | (x != x)
    return tl.where(positive, x, 0.0), tl.where(positive, 1.0, 0.0)


@triton.jit
def _relu_sq(x):
    r, _ = _relu(x)
    return r * r, 2.0 * r


# --- plain ----------------------------------------------------------------------------------------
@triton.jit
def silu(z):
    return _silu(z)[0]


@triton.jit
def silu_backward(z, da):
    a, slope = _silu(z)
    return a, slope * da


@triton.jit
def gelu(z):
    return _gelu(z)[0]


@triton.jit
def gelu_backward(z, da):
    a, slope = _gelu(z)
    return a, slope * da


@triton.jit
def gelu_tanh(z):
    return _gelu_tanh(z)[0]


@triton.jit
def gelu_tanh_backward(z, da):
    a, slope = _gelu_tanh(z)
    return a, slope * da


@triton.jit
def relu(z):
    return _relu(z)[0]


@triton.jit
def relu_backward(z, da):
    a, slope = _relu(z)
    return a, slope * da


@triton.jit
def relu_sq(z):
    return _relu_sq(z)[0]


@triton.jit
def relu_sq_backward(z, da):
    a, slope = _relu_sq(z)
    return a, slope * da


# --- gated ----------------------------------------------------------------------------------------
@triton.jit
def swiglu(g, u):
    return _silu(g)[0] * u


@triton.jit
def swiglu_backward(g, u, da):
    value, slope = _silu(g)
    return value * u, da * u * slope, da * value


@triton.jit
def geglu(g, u):
    return _gelu(g)[0] * u


@triton.jit
def geglu_backward(g, u, da):
    value, slope = _gelu(g)
    return value * u, da * u * slope, da * value


@triton.jit
def geglu_tanh(g, u):
    return _gelu_tanh(g)[0] * u


@triton.jit
def geglu_tanh_backward(g, u, da):
    value, slope = _gelu_tanh(g)
    return value * u, da * u * slope, da * value


@triton.jit
def reglu(g, u):
    return _relu(g)[0] * u


@triton.jit
def reglu_backward(g, u, da):
    value, slope = _relu(g)
    return value * u, da * u * slope, da * value


@triton.jit
def _clamped(gate, up):
    """gate and up, clamped; NaN stays NaN."""
    g = tl.minimum(gate, _CLAMP_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    u = tl.minimum(up, _CLAMP_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return g, tl.maximum(u, -_CLAMP_LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _with_offset(u):
    """u + offset, without an addition of zero, which the compiler would keep for −0."""
    if _CLAMP_OFFSET != 0.0:
        return u + _CLAMP_OFFSET
    else:
        return u


@triton.jit
def swiglu_clamped(g, u):
    g, u = _clamped(g, u)
    return _with_offset(u) * g * _sigmoid(_CLAMP_ALPHA * g)


@triton.jit
def swiglu_clamped_backward(gate, up, da):
    g, u = _clamped(gate, up)
    s = _sigmoid(_CLAMP_ALPHA * g)
    value = g * s
    slope = s * (1.0 + _CLAMP_ALPHA * g * (1.0 - s))
    u = _with_offset(u)
    dg = tl.where(gate > _CLAMP_LIMIT, 0.0, da * u * slope)
    du = tl.where(tl.abs(up) > _CLAMP_LIMIT, 0.0, da * value)
    return u * value, dg, du


@triton.jit
def _soft_capped(x, CAP: tl.constexpr):
    """CAP·tanh(x / CAP) and its slope, for operands of _BITS bits.

    Next to zero the exponential cancels: its error of 2e-7 is then relative to a smaller value.
    There it is x, with a relative error of at most 3e-5, which 16 bits do not resolve; or for 32
    bits a polynomial fitted to 6e-8. For 8 bits the GPU's own tanh, of 11 bits, is enough: dZ in
    FP8 would have up to 155 KB of instructions otherwise, and take 1.08 to 1.32 times as long.
    """
    if _BITS == 8 and _PTX:
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;",
            "=f,f",
            [x * (1.0 / CAP)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return CAP * t, 1.0 - t * t
    else:
        r = _reciprocal(1.0 + tl.exp2((2.0 * _LOG2E / CAP) * x))
        far = CAP - (2.0 * CAP) * r
        if _BITS == 32:
            q = x * x * (1.0 / (CAP * CAP))
            p = -0.33333312 + q * (0.13330514 + q * (-0.05339105 + q * 0.01799922))
            value = tl.where(tl.abs(x) < 0.5 * CAP, x + x * q * p, far)
        else:
            value = tl.where(tl.abs(x) < CAP / 128, x, far)
        t = 1.0 - 2.0 * r
        return value, 1.0 - t * t


@triton.jit
def swiglu_soft_capped(gate, up):
    g, _ = _soft_capped(gate, _GATE_CAP)
    u, _ = _soft_capped(up, _UP_CAP)
    return g * _sigmoid(gate) * u


@triton.jit
def swiglu_soft_capped_backward(gate, up, da):
    g, g_slope = _soft_capped(gate, _GATE_CAP)
    u, u_slope = _soft_capped(up, _UP_CAP)
    s = _sigmoid(gate)
    value = g * s
    slope = s * g_slope + value * (1.0 - s)
    return value * u, da * u * slope, da * value * u_slope


def _compiled_with(templates, **constants):
    """Functions of this module, for other values of its constants."""
    scope = globals() | {name: tl.constexpr(value) for name, value in constants.items()}
    for template in templates:
        code = template.fn.__code__
        scope[code.co_name] = triton.jit(FunctionType(code, scope, code.co_name))
    return tuple(scope[template.fn.__code__.co_name] for template in templates[-2:])


@cache
def _clamped_with(clamp: Clamp):
    templates = (_clamped, _with_offset, swiglu_clamped, swiglu_clamped_backward)
    constants = {f"_CLAMP_{name.upper()}": value for name, value in clamp._asdict().items()}
    return _compiled_with(templates, **constants)


@cache
def _soft_capped_with(caps: SoftCaps, bits: int):
    templates = (_soft_capped, swiglu_soft_capped, swiglu_soft_capped_backward)
    return _compiled_with(templates, _GATE_CAP=caps.gate, _UP_CAP=caps.up, _BITS=bits)


# --- lookup ---------------------------------------------------------------------------------------
_FORWARD_AND_BACKWARD = {
    ActivationType.SWIGLU: (swiglu, swiglu_backward),
    ActivationType.GEGLU: (geglu, geglu_backward),
    ActivationType.GEGLU_TANH: (geglu_tanh, geglu_tanh_backward),
    ActivationType.REGLU: (reglu, reglu_backward),
    ActivationType.SWIGLU_CLAMPED: (swiglu_clamped, swiglu_clamped_backward),
    ActivationType.RELU_SQ: (relu_sq, relu_sq_backward),
    ActivationType.RELU: (relu, relu_backward),
    ActivationType.GELU: (gelu, gelu_backward),
    ActivationType.GELU_TANH: (gelu_tanh, gelu_tanh_backward),
    ActivationType.SILU: (silu, silu_backward),
}


def _functions_of(activation: ActivationType, dtype: torch.dtype):
    if activation.soft_caps:
        return _soft_capped_with(activation.soft_caps, 8 * dtype.itemsize)
    return _FORWARD_AND_BACKWARD.get(activation) or _clamped_with(activation.clamp)


def value_of(activation: ActivationType, dtype: torch.dtype):
    """f of an activation, for kernels of the forward pass on data of this dtype."""
    return _functions_of(activation, dtype)[0]


def derivative_of(activation: ActivationType, dtype: torch.dtype):
    """df of an activation, for kernels of the backward pass on data of this dtype."""
    return _functions_of(activation, dtype)[1]
