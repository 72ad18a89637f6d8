"""precision="fp8" on a GPU, on values like those of trained models."""

import pytest
from fp8_value_checks import check_fp8_values
from helpers import Case

from sonicmoe import ActivationType
from sonicmoe.bench.values import VALUES

pytestmark = pytest.mark.gpu
CUDA = "cuda"
SHAPES = ("2048,2048,768,4,2", "1024,2880,2880,2,2", "1024,7168,2048,4,2")


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_with_exact_maxima(shape, values):
    check_fp8_values(Case(shape, values=values), CUDA, "triton")


@pytest.mark.parametrize("values", VALUES)
def test_with_z_in_fp8(values):
    check_fp8_values(Case(SHAPES[0], values=values), CUDA, "triton", memory="e4m3")


@pytest.mark.parametrize("values", ["rows_100", "log_normal", "channels_30", "trained"])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize("activation", [ActivationType.SWIGLU_CLAMPED, ActivationType.RELU_SQ])
def test_other_activations(values, activation, gate_up):
    case = Case("1024,1040,400,3,2", activation=activation, gate_up=gate_up, values=values)
    check_fp8_values(case, CUDA, "triton")
