"""Activations alone, over more than a layer's values reach: exact in fp32, far below zero too."""

import math

import pytest
import torch
import triton
import triton.language as tl
from devices import on

from sonicmoe import ActivationType
from sonicmoe.kernels.activation import derivative_of, value_of
from sonicmoe.tensors import E4M3

pytestmark = on("interpreter")

F = torch.nn.functional
PLAIN = {
    ActivationType.SILU: F.silu,
    ActivationType.GELU: F.gelu,
    ActivationType.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    ActivationType.RELU: F.relu,
    ActivationType.RELU_SQ: lambda x: F.relu(x).square(),
}

# GELU(x) / x without a difference of almost equal numbers, which PyTorch's tanh GELU has.
FAR_BELOW_ZERO = {
    ActivationType.GELU: lambda x: torch.special.log_ndtr(x).exp(),
    ActivationType.GELU_TANH: lambda x: torch.sigmoid((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3)),
}


@triton.jit
def _kernel(
    x, out, SIZE: tl.constexpr, VALUE: tl.constexpr, DERIVATIVE: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, SIZE)
    z = tl.load(x + i)
    again, slope = DERIVATIVE(z, 1.0)
    tl.store(out + i, VALUE(z))
    tl.store(out + SIZE + i, again)
    tl.store(out + 2 * SIZE + i, slope)


def _kernels(activation, x):
    """Value, value of the backward pass, slope."""
    out = torch.full((3, len(x)), float("nan"))
    _kernel[(1,)](x, out, len(x), value_of(activation, x.dtype), derivative_of(activation, x.dtype))
    return out


def _torchs(activation, x):
    x = x.clone().requires_grad_()
    value = PLAIN[activation](x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    return torch.stack([value.detach(), value.detach(), slope])


@triton.jit
def _gated_kernel(
    g, u, out, SIZE: tl.constexpr, VALUE: tl.constexpr, DERIVATIVE: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, SIZE)
    gate, up = tl.load(g + i), tl.load(u + i)
    again, dgate, dup = DERIVATIVE(gate, up, 1.0)
    tl.store(out + i, VALUE(gate, up))
    tl.store(out + SIZE + i, again)
    tl.store(out + 2 * SIZE + i, dgate)
    tl.store(out + 3 * SIZE + i, dup)


def _soft_capped(caps, gate, up, dtype):
    """Value, value of the backward pass, slopes by gate and by up: of our kernels, and exact."""
    activation, device = ActivationType.soft_capped_swiglu(*caps), gate.device
    out = torch.full((4, len(gate)), float("nan"), device=device)
    functions = value_of(activation, dtype), derivative_of(activation, dtype)
    _gated_kernel[(1,)](gate, up, out, len(gate), *functions)
    g, u = (t.double().requires_grad_() for t in (gate, up))
    value = caps[0] * torch.tanh(g / caps[0]) * torch.sigmoid(g) * caps[1] * torch.tanh(u / caps[1])
    slopes = torch.autograd.grad(value.sum(), (g, u))
    return out.double(), torch.stack([value.detach(), value.detach(), *slopes])


# Relative errors of values, and errors of slopes relative to the larger cap.
SOFT_CAPS = {
    torch.float32: (4e-6, 1e-6),
    torch.bfloat16: (7e-5, 1e-4),
    E4M3: (1e-3, 2e-3),
}


def test_no_plain_activation_is_left_out():
    assert set(PLAIN) == {a for a in ActivationType if not a.is_gated}


@pytest.mark.parametrize("activation", PLAIN, ids=lambda a: a.value)
def test_as_exact_as_pytorch(activation):
    x = torch.linspace(-12, 12, 4096)
    exact = _torchs(activation, x.double())
    error = (_kernels(activation, x).double() - exact).abs().amax(1)
    theirs = (_torchs(activation, x).double() - exact).abs().amax(1)
    assert (error <= 2 * theirs + 1e-7).all(), (error, theirs)


@pytest.mark.parametrize("activation", FAR_BELOW_ZERO, ids=lambda a: a.value)
def test_gelu_is_exact_far_below_zero(activation):
    x = torch.linspace(-8, -1, 4096)
    exact_x = x.double().requires_grad_()
    exact = exact_x * FAR_BELOW_ZERO[activation](exact_x)
    (exact_slope,) = torch.autograd.grad(exact.sum(), exact_x)
    value, again, slope = _kernels(activation, x)
    assert torch.equal(value, again)
    assert ((value - exact) / exact).abs().max() < 1e-5
    assert ((slope - exact_slope) / exact_slope).abs().max() < 1e-5


@pytest.mark.parametrize("activation", PLAIN, ids=lambda a: a.value)
def test_nan_stays(activation):
    assert _kernels(activation, torch.tensor([float("nan"), 0.0]))[:, 0].isnan()[:2].all()


@on("interpreter", "cuda")
@pytest.mark.parametrize("dtype", SOFT_CAPS, ids=str)
@pytest.mark.parametrize("caps", [(4.0, 25.0), (0.5, 2.0)])
def test_soft_caps(caps, dtype, device):
    """From 2⁻²⁰ to far above the caps, and down to where σ(gate) is 1e-7."""
    size = torch.exp2(torch.linspace(-20, 8, 64))
    signed = torch.cat([size, -size]).to(device)
    gate, up = torch.cartesian_prod(signed.clamp(min=-16), signed).T.contiguous()
    got, want = _soft_capped(caps, gate, up, dtype)
    values, slopes = SOFT_CAPS[dtype]
    relative = ((got - want) / want)[:2].abs().amax()
    absolute = (got - want)[2:].abs().amax() / max(caps)
    assert relative < values and absolute < slopes, (relative, absolute)


@on("interpreter", "cuda")
@pytest.mark.parametrize("dtype", SOFT_CAPS, ids=str)
def test_soft_caps_of_what_is_not_finite(dtype, device):
    nan, inf = float("nan"), float("inf")
    gate = torch.tensor([inf, inf, -inf, 1.0, nan, nan, 1.0, 1.0], device=device)
    up = torch.tensor([inf, 1.0, 1.0, -inf, 1.0, inf, nan, inf], device=device)
    got, want = _soft_capped((4.0, 25.0), gate, up, dtype)
    torch.testing.assert_close(got, want, rtol=3e-3, atol=3e-3, equal_nan=True)
