"""Experts on packed weights: `torch.equal` to experts on the decoded ones."""

import pytest
import torch
from packed_checks import check_experts
from packed_weights import FORMATS

from sonicmoe import ActivationType

CLAMPED, GELU = ActivationType.SWIGLU_CLAMPED, ActivationType.GELU


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("transposed", [(False, False), (True, True)], ids=["nk", "kn"])
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, transposed, precision):
    check_experts(format, transposed=transposed, precision=precision)


@pytest.mark.parametrize("precision", [None, "fp8", "fp8_bf16_dw"])
@pytest.mark.parametrize(
    "case",
    [
        {"lora": False},
        {"lora": False, "bias": True},
        {"bias": True, "activation": CLAMPED},
        {"bias": True, "activation": CLAMPED, "gate_up": "concatenated"},
        {"activation": GELU, "is_sorted": True},
        {"counts": (0, 39, 1, 0)},
        {"memory": "recompute", "bias": True},
        {"memory": "e4m3"},
        {"packed": (True, False)},
        {"packed": (True, False), "trains_the_other": True},
        {"packed": (False, True), "trains_the_other": True},
    ],
    ids=str,
)
def test_cases(case, precision):
    check_experts(precision=precision, **case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    check_experts("nf4", dtype=dtype)
