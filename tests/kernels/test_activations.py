"""Activations alone, over more than a layer's values reach: exact in fp32, far below zero too."""

import pytest
import torch
import triton
import triton.language as tl
from devices import on

from sonicmoe import ActivationType
from sonicmoe.kernels.activation import derivative_of, value_of

pytestmark = on("interpreter")

F = torch.nn.functional
PLAIN = {
    ActivationType.SILU: F.silu,
    ActivationType.GELU: F.gelu,
    ActivationType.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    ActivationType.RELU: F.relu,
    ActivationType.RELU_SQ: lambda x: F.relu(x).square(),
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
    _kernel[(1,)](x, out, len(x), value_of(activation), derivative_of(activation))
    return out


def _torchs(activation, x):
    x = x.clone().requires_grad_()
    value = PLAIN[activation](x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    return torch.stack([value.detach(), value.detach(), slope])


def test_no_plain_activation_is_left_out():
    assert set(PLAIN) == {a for a in ActivationType if not a.is_gated}


@pytest.mark.parametrize("activation", PLAIN, ids=lambda a: a.value)
def test_as_exact_as_pytorch(activation):
    x = torch.linspace(-12, 12, 4096)
    exact = _torchs(activation, x.double())
    error = (_kernels(activation, x).double() - exact).abs().amax(1)
    theirs = (_torchs(activation, x).double() - exact).abs().amax(1)
    assert (error <= 2 * theirs + 1e-7).all(), (error, theirs)


def test_gelu_is_exact_far_below_zero():
    x = torch.linspace(-8, -1, 4096)
    exact = torch.special.log_ndtr(x.double()).exp() * x.double()
    value, again, _ = _kernels(ActivationType.GELU, x)
    assert torch.equal(value, again)
    assert ((value.double() - exact) / exact).abs().max() < 1e-5


@pytest.mark.parametrize("activation", PLAIN, ids=lambda a: a.value)
def test_nan_stays(activation):
    assert _kernels(activation, torch.tensor([float("nan"), 0.0]))[:, 0].isnan()[:2].all()
