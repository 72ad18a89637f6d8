"""Decoders of packed weights, and the experts whose GEMMs they feed."""

import weakref

import pytest
import torch
from devices import on
from packed_checks import check_experts
from packed_decoder_checks import (
    check_decoded,
    check_quantized,
    check_tiles,
    every_e4m3,
    every_mxfp4,
)
from packed_weights import FORMATS, random_packed

from sonicmoe import ActivationType, tensors
from sonicmoe.launch import weights as launch

pytestmark = on("interpreter")


@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("format", FORMATS)
def test_decoders(format, transposed):
    w = random_packed(format, (2, 160, 192), transposed)
    check_decoded(w, "cpu")
    check_quantized(w, "cpu")


def test_the_tiles_of_a_part():
    check_tiles("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    check_decoded(random_packed("nf4", (2, 40, 72)), "cpu", dtype)


@pytest.mark.parametrize("shape", [(2, 8, 40), (2, 136, 8)])
@pytest.mark.parametrize("format", ["nf4", "fp8"])
def test_small_sizes(format, shape):
    """Blocks that cross rows, and rows shorter than a block."""
    check_decoded(random_packed(format, shape), "cpu")
    check_quantized(random_packed(format, shape), "cpu")


def test_every_value():
    check_decoded(every_mxfp4(), "cpu")
    check_decoded(every_e4m3(), "cpu")


@pytest.mark.parametrize(
    "case",
    [
        {"bias": True, "activation": ActivationType.SWIGLU_CLAMPED, "gate_up": "concatenated"},
        {"format": "nf4", "is_sorted": True, "bias": True, "transposed": (True, True)},
        {
            "format": "fp8",
            "memory": "recompute",
            "counts": (0, 39, 1, 0),
            "transposed": (True, False),
        },
        {"format": "int4", "memory": "slices", "size": 2},
        {"format": "int4", "bias": True, "gate_up": "concatenated", "transposed": (True, True)},
        {"format": "int4", "bias": True, "precision": "fp8", "transposed": (False, True)},
    ],
    ids=str,
)
@pytest.mark.parametrize("limit", [2**30, 10000], ids=["at once", "in parts"])
def test_experts(case, limit, monkeypatch):
    monkeypatch.setattr(tensors, "DECODED_BYTES", limit)
    check_experts(backend="triton", **case)


def test_one_part_exists_at_a_time(monkeypatch):
    """And none between the GEMMs."""
    decode, alive = launch.dequantize_weight, []

    def watched(*args):
        assert not any(part() is not None for part in alive)
        found = decode(*args)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(launch, "dequantize_weight", watched)
    monkeypatch.setattr(tensors, "DECODED_BYTES", 10000)
    check_experts(backend="triton", memory="recompute")
    assert len(alive) == 4 + 2 + 4 + 2 + 4  # up, down, up again, dZ and dX
