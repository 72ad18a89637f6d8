"""precision="fp8" on values like those of trained models, and the bounds of its scales."""

import pytest
import torch
from devices import values_on
from fp8_value_checks import check_fp8_values
from helpers import ACTIVATIONS, SOFT_CAPPED, Case, make_inputs, plain, relative_error, run

import sonicmoe
from sonicmoe import ActivationType
from sonicmoe.reference import activation as reference
from sonicmoe.reference import fp8, fp8_scales, quantize
from sonicmoe.tools.values import VALUES

LARGE = ("2048,2048,768,4,2", "1024,2880,2880,2,2", "1024,7168,2048,4,2")


@values_on(
    "case",
    cpu=[Case("256,1024,272,2,1", values=v, routing="uniform") for v in VALUES],
    cuda=[Case(shape, values=v) for shape in LARGE for v in VALUES],
)
def test_as_with_exact_maxima(case, device, backend):
    check_fp8_values(case, device, backend)


@values_on("case", cuda=[Case(LARGE[0], values=v) for v in VALUES])
def test_with_z_in_e4m3(case, device, backend):
    check_fp8_values(case, device, backend, memory="e4m3")


@values_on(
    "shape, values",
    cpu=[("320,512,272,2,1", v) for v in ("rows_100", "log_normal")],
    cuda=[
        ("1024,1040,400,3,2", v) for v in ("rows_100", "log_normal", "channels_30", "trained")
    ],
)  # fmt: skip
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize(
    "activation", [ActivationType.SWIGLU_CLAMPED, SOFT_CAPPED, ActivationType.RELU_SQ]
)
def test_other_activations(shape, values, activation, gate_up, device, backend):
    case = Case(shape, activation=activation, gate_up=gate_up, values=values)
    check_fp8_values(case, device, backend)


@values_on(
    "shape",
    cpu=["320,512,272,2,1", "1024,1040,400,3,2"],
    cuda=["1024,1040,400,3,2"],
)
@pytest.mark.parametrize("values", ["channels_30", "channels_100"])
def test_weight_gradients_in_bf16_of_saturated_soft_caps(shape, values, device, backend):
    """What docs/numerics.md advises where the bound of a slope is loose."""
    case = Case(shape, activation=SOFT_CAPPED, values=values)
    check_fp8_values(case, device, backend, precision="fp8_bf16_dw")


def in_fp8(case: Case, inputs) -> dict[str, torch.Tensor]:
    def layer(**given):
        return sonicmoe.experts(**given, precision="fp8", **case.options)

    return run(layer, inputs)


def largest_values(case: Case, inputs, monkeypatch) -> tuple[float, float, float]:
    """The largest values of dZ, dZᵀ and A'ᵀ before they are rounded to e4m3."""
    found, saturated = [], fp8._saturated

    def recorded(value):
        found.append(value.abs().max().item())
        return saturated(value)

    monkeypatch.setattr(fp8, "_saturated", recorded)
    in_fp8(case, inputs)
    monkeypatch.undo()
    return tuple(found)


def test_nothing_saturates(monkeypatch):
    """What is rounded to e4m3 is at most its largest number: the scales are true bounds."""
    largest: dict[str, list[float]] = {"to_e4m3": [], "_saturated": []}

    def record(module, name):
        original = getattr(module, name)

        def recorded(value):
            largest[name].append(value.abs().max().item())
            return original(value)

        monkeypatch.setattr(module, name, recorded)

    for module, name in ((fp8, "to_e4m3"), (quantize, "to_e4m3"), (fp8, "_saturated")):
        record(module, name)
    for activation in ACTIVATIONS:
        case = Case("512,256,192,8,2", activation=activation)
        inputs = make_inputs(case)
        inputs.x *= torch.exp2(3 * torch.randn(512, 1)).bfloat16()
        inputs.dout = inputs.x.roll(1, 0)  # correlated with what it meets
        inputs.scores *= torch.exp2(3 * torch.randn(512, 2))
        in_fp8(case, inputs)
    assert len(largest["to_e4m3"]) == 9 * len(ACTIVATIONS)  # X twice
    assert len(largest["_saturated"]) == 3 * len(ACTIVATIONS)  # dZ, dZᵀ, A'ᵀ
    assert all(224 < max(values) <= 448 for values in largest.values())


def parallel(case: Case, gate: float, up: float, size: float):
    """Inputs where dO is parallel to every column of W2, and Z has the same values everywhere."""
    inputs = make_inputs(case)
    column = size * torch.tensor([1.0, -2.0] * 16)
    inputs.w2 = (column[:, None] * torch.ones(16)).bfloat16()[None]
    inputs.w1 = torch.full_like(inputs.w1, gate / 32)
    if case.activation.is_gated:
        inputs.w1[:, 1::2] = up / 32
    inputs.x, inputs.dout = torch.ones_like(inputs.x), column.bfloat16().expand(16, 32)
    return inputs


# 1.07 becomes 1.125 in e4m3, in dO and in W2.
@pytest.mark.parametrize("size", [1.0, 1.0703125])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
def test_the_bounds_hold_where_they_are_attained(activation, size, monkeypatch):
    """Z is 2.4, where the derivatives of SiLU and GELU are 1.1; a gate with a soft cap is 1.

    Powers of two hide a factor of 2, so the scale of dO sweeps over them. In dZᵀ nothing is hidden:
    the largest value is a fixed part of 448.
    """
    case = Case("16,32,16,1,1", activation=activation, routing="one_expert")
    inputs = parallel(case, 1.0 if activation.soft_caps else 2.4, 2.4, size)
    dout, largest = inputs.dout.float(), []
    for step in range(9):
        inputs.dout = (dout * 2.0 ** (step / 8)).bfloat16()
        values = largest_values(case, inputs, monkeypatch)
        assert max(values) <= 448, values
        largest.append(values)
    of_rows, of_columns, _ = (max(each) for each in zip(*largest, strict=True))
    assert of_rows > 224 and of_columns > 224  # and the bounds are tight


@pytest.mark.parametrize(
    "caps", [(4.0, 25.0), (1.5, 2.5), (100.0, 0.1), (0.1, 100.0), (1e-3, 1e-3)]
)
def test_the_bounds_of_soft_caps_hold(caps):
    activation = ActivationType.soft_capped_swiglu(*caps)
    bound = fp8_scales.slope_of(activation)
    size = torch.exp2(torch.linspace(-16, 10, 261, dtype=torch.float64))
    z = torch.cartesian_prod(torch.cat([size, -size]), size)
    zmax, one = z.abs().amax(1), torch.ones(len(z), 1, dtype=torch.float64)
    slopes = reference.activate_backward(z, one, activation, "interleaved").abs().amax(1)
    values = reference.activate(z, activation, "interleaved")[:, 0].abs()
    assert (slopes <= 1.0001 * fp8_scales.LARGEST_SLOPE * bound.bound(zmax)).all()
    assert (values <= 1.0001 * bound.value_bound(zmax)).all()


def test_a_clamp_that_does_not_bound_the_slope(monkeypatch):
    """With alpha < 0 a gate far below zero is not damped, and is clamped from above only."""
    activation = ActivationType.clamped_swiglu(0.5, alpha=-1.0)
    case = Case("16,32,16,1,1", activation=activation, routing="one_expert")
    assert max(largest_values(case, parallel(case, -40.0, 0.25, 1.0), monkeypatch)) <= 448


@pytest.mark.parametrize("offset", [1.0, -3.0])
def test_small_z_of_an_activation_with_an_offset(offset):
    """The slope of a clamped SwiGLU is the offset, however small Z is."""
    activation = ActivationType.clamped_swiglu(7.0, alpha=1.702, offset=offset)
    case = Case("256,256,192,4,2", activation=activation)
    inputs = make_inputs(case)
    inputs.x *= 2.0**-6
    got, exact = in_fp8(case, inputs), run(plain(case), inputs.double())
    for name in got:
        assert relative_error(got[name], exact[name]) < 0.075, name


def test_scores_below_zero():
    case = Case("256,256,192,4,2")
    inputs = make_inputs(case)
    inputs.scores = -inputs.scores.abs()
    got, exact = in_fp8(case, inputs), run(plain(case), inputs.double())
    for name in got:
        assert relative_error(got[name], exact[name]) < 0.075, name


@pytest.mark.parametrize("size", [1e20, 1e-25, 1e-34])
def test_range_of_the_gradient(size):
    """dO as large or small as bf16 can take it through the layer."""
    case = Case("256,256,192,4,2")
    inputs = make_inputs(case)
    inputs.dout = (inputs.dout.double() * size).bfloat16()
    got, exact = in_fp8(case, inputs), run(plain(case), inputs.double())
    for name in got:
        assert relative_error(got[name], exact[name]) < 0.075, name


def test_one_neuron_does_not_drown_the_others():
    """A is ten thousand times larger in one column: other blocks of 128 keep their dW2."""
    case = Case("256,256,384,1,1", routing="one_expert")
    inputs = make_inputs(case)
    inputs.w1[0, 10:12] *= 100  # its gate and its up
    got, exact = in_fp8(case, inputs), run(plain(case), inputs.double())
    assert relative_error(got["dw2"][..., 128:], exact["dw2"][..., 128:]) < 0.075


def test_a_row_of_a_has_its_own_maximum():
    """SiLU is nearly zero far below zero: a bound from |Z| alone would make A' zero in e4m3."""
    case = Case("16,32,16,1,1", routing="one_expert")
    inputs = parallel(case, -12.0, 12.0, 1.0)
    got, exact = in_fp8(case, inputs), run(plain(case), inputs.double())
    assert relative_error(got["dw2"], exact["dw2"]) < 0.075


def test_norms_of_columns_that_become_subnormal():
    """A value just above half of the smallest number in e4m3 is rounded to twice its size."""
    w = torch.full((1, 64, 16), 2.0**-10 * 1.0078125)
    w[0, 0, 0] = 448.0
    w8, _, scale, norm = quantize.quantize_weight(w.bfloat16(), False, True)
    assert scale.item() == 1.0 and w8[0, 1, 1].float() == 2.0**-9
    assert (w8.float().norm(dim=1) <= norm).all()
