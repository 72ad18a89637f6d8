"""The map of shared memory in docs/pictures/draw.py is what the compiler allocates."""

import runpy
from pathlib import Path

import pytest
import torch
from machine_code import compiling
from test_machine_code import WIDE, compile_layer
from test_machine_code_fp8_dz import ALL, compile_dz

from sonicmoe import ActivationType
from sonicmoe.launch import fp8, fp8_wgrad
from sonicmoe.shapes import padded_rows
from sonicmoe.tensors import NO_LORA, Permutation, Weight

DRAW = Path(__file__).parents[2] / "docs" / "pictures" / "draw.py"
MEMORY = {memory.kernel: memory.size for memory in runpy.run_path(str(DRAW))["MEMORY"]}
E4M3 = torch.float8_e4m3fn
SWIGLU = ActivationType.SWIGLU


def test_bf16():
    compiled = compile_layer(90, torch.bfloat16, SWIGLU, "interleaved", False, False, WIDE)
    found = {k.metadata.name: k.metadata.shared for k in compiled}
    for name in ("up", "gemm", "dz", "wgrad"):
        assert found[f"hopper_{name}_kernel"] == MEMORY[name], name


def compiled_fp8(name):
    hidden, inner = WIDE
    maps, tiles = torch.zeros(64, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int32)
    p = Permutation(maps, maps, maps, None, None, maps[:3], tiles, 128)

    def e4m3(*shape):
        return torch.zeros(shape, dtype=E4M3)

    if name == "fp8_dz":
        return compile_dz(hidden, inner, SWIGLU, "interleaved", True, ALL, torch.bfloat16)
    with compiling(90) as compiled:
        if name == "fp8_up":
            w = Weight(None, e4m3(2, 2 * inner, hidden), None, torch.ones(2))
            act = (SWIGLU, "interleaved", torch.bfloat16)
            fp8.up(e4m3(64, hidden), torch.ones(64), w, None, NO_LORA, p, *act)
        elif name == "fp8_gemm":
            w = Weight(None, e4m3(2, hidden, inner), None, torch.ones(2))
            a_scale = torch.ones(inner // 128, 64)
            fp8.down(e4m3(64, inner), a_scale, w, None, None, NO_LORA, p)
        else:
            dw = torch.zeros(2, 2 * inner, hidden, dtype=torch.bfloat16).mT
            other_t = e4m3(2 * inner, padded_rows(64, 2))
            fp8_wgrad.weight_gradient(e4m3(64, hidden), other_t, torch.ones(2, 2 * inner), dw, p)
    return compiled[0]


@pytest.mark.parametrize("name", ["fp8_up", "fp8_gemm", "fp8_dz", "fp8_wgrad"])
def test_fp8(name):
    assert compiled_fp8(name).metadata.shared == MEMORY[name]
