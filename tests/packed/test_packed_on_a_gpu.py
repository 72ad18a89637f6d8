"""Packed weights on a GPU: decoders bit by bit, and experts against those on decoded weights."""

import pytest
import torch
from packed_checks import check_experts
from packed_decoder_checks import (
    check_decoded,
    check_quantized,
    check_tiles,
    every_e4m3,
    every_mxfp4,
)
from packed_weights import FORMATS, random_packed

from sonicmoe import ActivationType, Mxfp4, tensors
from sonicmoe.launch.weights import dequantize_weight

pytestmark = pytest.mark.gpu
CUDA = "cuda"
CLAMPED, GELU = ActivationType.SWIGLU_CLAMPED, ActivationType.GELU


@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("format", FORMATS)
def test_decoders(format, transposed):
    for shape in ((3, 1536, 2048), (3, 2880, 5760), (2, 160, 96)):
        w = random_packed(format, shape, transposed)
        check_decoded(w, CUDA)
        check_quantized(w, CUDA)


def test_the_tiles_of_a_part():
    check_tiles(CUDA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    for format in FORMATS:
        check_decoded(random_packed(format, (2, 160, 192)), CUDA, dtype)


def test_every_value():
    check_decoded(every_mxfp4(), CUDA)
    check_decoded(every_e4m3(), CUDA)


def test_plain_pytorch_decodes_on_the_gpu():
    for format in FORMATS:
        w = random_packed(format, (3, 160, 192)).to(CUDA)
        assert torch.equal(w.dequantize().cpu(), w.to("cpu").dequantize())


def test_more_than_two_to_the_31_weights():
    shape = (300, 4096, 2048)
    blocks = torch.randint(0, 256, (*shape[:2], 64, 16), dtype=torch.uint8, device=CUDA)
    scales = torch.randint(110, 125, (*shape[:2], 64), dtype=torch.uint8, device=CUDA)
    w, last = Mxfp4(blocks, scales), Mxfp4(blocks[-2:].cpu(), scales[-2:].cpu())
    found = dequantize_weight(w.stored(), 0, 300, torch.bfloat16)
    assert torch.equal(found[-2:].cpu(), last.dequantize())


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("transposed", [(False, False), (True, True)], ids=["nk", "kn"])
@pytest.mark.parametrize("format", FORMATS)
def test_experts(format, transposed, precision):
    check_experts(format, transposed=transposed, precision=precision, device=CUDA, size=8)


@pytest.mark.parametrize("limit", [2**30, 300_000], ids=["at once", "in parts"])
@pytest.mark.parametrize("precision", [None, "fp8", "fp8_bf16_dw"])
@pytest.mark.parametrize(
    "case",
    [
        {"lora": False, "bias": True},
        {"bias": True, "activation": CLAMPED},
        {"bias": True, "activation": CLAMPED, "gate_up": "concatenated"},
        {"format": "int4", "bias": True, "gate_up": "concatenated", "transposed": (True, False)},
        {"activation": GELU, "is_sorted": True},
        {"counts": (0, 39, 1, 0)},
        {"memory": "recompute", "bias": True},
        {"memory": "e4m3"},
        {"memory": "slices"},
        {"packed": (True, False), "trains_the_other": True},
        {"packed": (False, True), "trains_the_other": True},
    ],
    ids=str,
)
def test_cases(case, precision, limit, monkeypatch):
    monkeypatch.setattr(tensors, "DECODED_BYTES", limit)
    check_experts(precision=precision, device=CUDA, size=8, **case)
