"""Values like those of trained models on a GPU, against fp64, by token, row and column."""

import pytest
import torch
from helpers import Case, same_bits
from memory_policies import EXACT, results
from value_checks import check_values

from sonicmoe.bench.values import TRAINED

pytestmark = pytest.mark.gpu
CUDA = "cuda"
SHAPES = ("1024,2048,768,8,2", "768,2880,720,4,2", "768,7168,256,4,2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("values", TRAINED)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_slice_is_within_the_budget(shape, values, dtype):
    check_values(Case(shape, dtype, values=values), CUDA, "triton")


@pytest.mark.parametrize("values", TRAINED)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_z_errs_as_the_reference(shape, values):
    check_values(Case(shape, values=values), CUDA, "triton", memory="e4m3")


@pytest.mark.parametrize("values", TRAINED)
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_other_layouts(values, gate_up):
    """Portable kernels (H = 200), biases, weights stored (E, K, N)."""
    case = Case("1500,200,136,5,3", bias=True, gate_up=gate_up, transposed=True, values=values)
    check_values(case, CUDA, "triton")


@pytest.mark.parametrize("values", TRAINED)
def test_recompute_and_slices_change_no_bit(values):
    case = Case(SHAPES[0], values=values)
    keep = results(case, "keep", CUDA, "triton")
    for memory in EXACT:
        same_bits(keep, results(case, memory, CUDA, "triton"))
