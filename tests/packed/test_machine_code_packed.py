"""The decoders of packed weights, compiled for GPUs that are not there."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton, which is for Linux")

from machine_code import compiling, report
from packed_weights import random_packed

from sonicmoe.launch import weights as launch

SHAPE = (1, 2880, 2880)
# And the weights of a thread.
KERNELS = {"dequantize_kernel": 64, "quantize_packed_kernel": 64, "quantize_transposed_kernel": 128}
LIMIT = 15 * 16  # bytes of code per weight; an instruction of Hopper has 16


@pytest.mark.parametrize("format", ["mxfp4", "nf4", "fp8", "int4"])
def test_decoders(format):
    w = random_packed(format, SHAPE).stored()._replace(w_scale=torch.ones(1))
    with compiling(90) as kernels:
        launch.dequantize_weight(w, 0, 1, torch.bfloat16)
        launch.quantize_packed(w, 0, 1)
        launch.quantize_packed(w.mT, 0, 1)
    assert [k.metadata.name for k in kernels] == list(KERNELS)
    for kernel in kernels:
        name, found = kernel.metadata.name, report(kernel)
        assert found["spills"] == 0, (name, found)
        assert found["bytes"] <= KERNELS[name] * LIMIT, (name, found)
        stores = re.findall(r"st\.global\S*", kernel.asm["ptx"])
        assert stores and all(".v4.b32" in store for store in stores), (name, stores)
        if name != "quantize_transposed_kernel":  # no exchange between threads
            assert found["shared"] == 0


@pytest.mark.parametrize("arch", [80, 100])
def test_other_gpus(arch):
    w = random_packed("mxfp4", SHAPE).stored()
    with compiling(arch) as kernels:
        launch.dequantize_weight(w, 0, 1, torch.bfloat16)
    assert report(kernels[0])["spills"] == 0
