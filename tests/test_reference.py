"""The plain PyTorch stages, with backward passes written out, against fp64 autograd."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ACTIVATIONS,
    ROUTINGS,
    Case,
    budget,
    check_experts,
    make_inputs,
    matrix,
    ours,
    plain,
    run,
)

import sonicmoe
from sonicmoe import ActivationType as A
from sonicmoe.reference.activation import CLAMP_LIMIT, activate, activate_backward


def _clamped(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _limited(gate, up):
    return F.silu(gate.clamp(max=3.0)) * up.clamp(min=-3.0, max=3.0)


def _soft_capped(gate, up):
    return 1.5 * torch.tanh(gate / 1.5) * torch.sigmoid(gate) * 2.5 * torch.tanh(up / 2.5)


FORMULAS = {
    A.SWIGLU: lambda g, u: g / (1 + torch.exp(-g)) * u,
    A.GEGLU: lambda g, u: F.gelu(g) * u,
    A.GEGLU_TANH: lambda g, u: F.gelu(g, approximate="tanh") * u,
    A.REGLU: lambda g, u: F.relu(g) * u,
    A.SWIGLU_CLAMPED: _clamped,
    A.clamped_swiglu(3.0): _limited,
    A.soft_capped_swiglu(1.5, 2.5): _soft_capped,
    A.RELU_SQ: lambda z: torch.where(z > 0, z * z, 0),
    A.RELU: lambda z: F.relu(z),
    A.GELU: lambda z: F.gelu(z),
    A.GELU_TANH: lambda z: F.gelu(z, approximate="tanh"),
    A.SILU: lambda z: F.silu(z),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_activation_and_its_derivative(activation, gate_up):
    z = (6 * torch.randn(50, 16, dtype=torch.float64)).requires_grad_()
    if activation.is_gated:
        halves = (z[:, :8], z[:, 8:]) if gate_up == "concatenated" else (z[:, 0::2], z[:, 1::2])
    else:
        halves = (z,)
    want = FORMULAS[activation](*halves)
    da = torch.randn_like(want)
    torch.testing.assert_close(activate(z, activation, gate_up), want)
    (dz,) = torch.autograd.grad(want, z, da)
    torch.testing.assert_close(activate_backward(z.detach(), da, activation, gate_up), dz)


def test_the_slope_at_a_limit_is_one():
    """PyTorch's own clamp has changed its mind about it."""
    z = torch.tensor([[CLAMP_LIMIT, CLAMP_LIMIT], [1.0, -CLAMP_LIMIT]], requires_grad=True)
    da = torch.ones(2, 1)
    (dz,) = torch.autograd.grad(activate(z, A.SWIGLU_CLAMPED, True), z, da)
    torch.testing.assert_close(dz, activate_backward(z.detach(), da, A.SWIGLU_CLAMPED, True))
    assert (dz != 0).all()


def test_the_same_constants_are_one_activation():
    limited = A.clamped_swiglu(10)
    assert limited is A.clamped_swiglu(10.0, alpha=1, offset=0) and limited not in list(A)
    assert A.clamped_swiglu(7, alpha=1.702, offset=1) is A.SWIGLU_CLAMPED
    for again in (A(limited.value), pickle.loads(pickle.dumps(limited)), copy.deepcopy(limited)):
        assert again is limited
    assert A("swiglu_clamped(limit=1e1,alpha=1,offset=0)") is limited
    assert limited.is_gated and limited.clamp == (10.0, 1.0, 0.0)
    capped = A.soft_capped_swiglu(4, 25)
    assert capped is A.soft_capped_swiglu(4.0, 25.0) and capped not in list(A)
    for again in (A(capped.value), pickle.loads(pickle.dumps(capped)), copy.deepcopy(capped)):
        assert again is capped
    assert A("swiglu_soft_capped(gate=4,up=2.5e1)") is capped
    assert capped.is_gated and capped.soft_caps == (4.0, 25.0) and capped.clamp is None


@pytest.mark.parametrize("constants", [(0,), (-1,), (math.inf,), (math.nan,), (1, math.inf)])
def test_constants_of_a_clamp_are_checked(constants):
    with pytest.raises(ValueError, match="limit, alpha and offset: expected finite numbers"):
        A.clamped_swiglu(constants[0], alpha=constants[-1])


@pytest.mark.parametrize("caps", [(0, 1), (1, -1), (math.inf, 1), (1, math.nan)])
def test_soft_caps_are_checked(caps):
    with pytest.raises(ValueError, match="gate_cap and up_cap: expected finite numbers > 0"):
        A.soft_capped_swiglu(*caps)


@pytest.mark.parametrize("value", ["swish", "swiglu_clamped()", "swiglu_soft_capped(gate=1)", 7])
def test_unknown_values_are_no_activation(value):
    with pytest.raises(ValueError, match="is not a valid ActivationType"):
        A(value)


# Enough tokens that the error of either side is measured to a few per cent.
CASES = matrix("200,32,16,4,2", routing="dropped")
CASES_64 = matrix("12,16,8,4,2", (torch.float64,), routing="dropped")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_is_within_the_budget(case):
    check_experts(case, "cpu", "torch")


@pytest.mark.parametrize("case", CASES_64, ids=str)
def test_every_gradient_in_fp64(case):
    given = make_inputs(case).double()
    got, want = run(ours(case, "torch"), given), run(plain(case), given)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "shape",
    [
        "0,16,8,4,2",  # no token
        "1,16,8,4,2",  # one token
        "30,16,8,4,4",  # K = E
        "150,16,8,4,2",  # more rows than a tile
        "30,16,8,1,1",  # one expert
    ],
)
def test_routings(shape, routing):
    check_experts(Case(shape, torch.float32, bias=True, routing=routing), "cpu", "torch")


def test_finite_differences():
    """Not by autograd's rules at all."""
    case = Case("5,8,8,3,2", torch.float64, bias=True, routing="dropped")
    given = make_inputs(case).double()
    leaves = [getattr(given, name).requires_grad_() for name in given.differentiable]

    def layer(x, scores, w1, w2, b1, b2):
        return sonicmoe.experts(x, given.ids, scores, w1, w2, b1, b2)

    assert torch.autograd.gradcheck(layer, leaves)


def test_budget_sees_what_it_must():
    """A result off by one bf16 step everywhere, a missing row, a NaN: none passes."""
    case = Case("64,32,16,4,2", routing="uniform")
    given = make_inputs(case)
    right, exact = run(plain(case), given), run(plain(case), given.double())
    for name, wrong in {
        "scaled": right["out"] * 1.0078125,
        "a row": right["out"].index_fill(0, torch.tensor([3]), 0),
        "nan": right["out"].index_fill(0, torch.tensor([3]), float("nan")),
    }.items():
        with pytest.raises(AssertionError):
            budget(wrong, right["out"], exact["out"], name=name)
