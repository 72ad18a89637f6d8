"""The dZ GEMM in FP8 compiles for Hopper: tensor cores, stmatrix, no spills in the epilogue."""

import re

import pytest
import torch
from helpers import SOFT_CAPPED
from machine_code import bounds_from_outside, compiling, report

from sonicmoe.enums import ActivationType
from sonicmoe.launch import fp8_dz
from sonicmoe.tensors import NO_LORA, DzResults, DzScales, Lora, Permutation, Weight
from sonicmoe.tuning import Target

ALL = DzResults(dz=True, dz_t=True, a=True, dscores=True)
DX = DzResults(dz=True, dz_t=False, a=False, dscores=True)  # weights are frozen
FROZEN = DzResults(dz=False, dz_t=False, a=False, dscores=True)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CACHE = 128 * 1024  # of instructions: see test_machine_code


def compile_dz(hidden, inner, activation, gate_up, gathered, needs, z_dtype, rank=0):
    experts, rows, tokens = 2, 64, 32 if gathered else 64

    def e4m3(*shape):
        return torch.zeros(shape, dtype=E4M3)

    def index(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    maps = index(rows) if gathered else None
    p = Permutation(maps, maps, maps, None, None, index(3), index(4, 4), 128)
    z = torch.zeros(rows, 2 * inner if activation.is_gated else inner, dtype=z_dtype)
    zmax = torch.zeros(-(-inner // 128), rows)
    scores = torch.zeros(tokens, rows // tokens)
    do8, w2_t = e4m3(tokens, hidden), e4m3(experts, inner, hidden)
    with compiling(90) as compiled:
        columns, blocks = torch.zeros(experts, inner), torch.zeros(experts, -(-inner // 128))
        scales = DzScales(torch.zeros(5, rows), columns, blocks, torch.zeros(rows), None, None)
        lora = NO_LORA
        if rank:
            b = torch.zeros(experts, inner, rank, dtype=BF16)
            lora = Lora(torch.zeros(rows, rank, dtype=BF16), b)
        given = (do8, scales, z, zmax, Weight(None, w2_t), (None, None), scores, lora, p)
        fp8_dz.dz_gemm(*given, activation, gate_up, needs)
    return compiled[0]


@pytest.mark.parametrize(
    ("sizes", "activation", "gate_up", "gathered", "needs", "spills", "transposed", "z_dtype"),
    [
        ((2048, 1024), ActivationType.SWIGLU, "interleaved", True, ALL, 0, 24, BF16),
        ((2048, 1024), ActivationType.SWIGLU, "concatenated", True, ALL, 0, 24, BF16),
        ((272, 144), ActivationType.SWIGLU_CLAMPED, "concatenated", False, ALL, 0, 24, BF16),
        ((1536, 256), ActivationType.RELU, "interleaved", True, ALL, 0, 16, BF16),
        ((1536, 256), ActivationType.SWIGLU, "interleaved", True, FROZEN, 0, 0, BF16),
        ((2048, 1024), SOFT_CAPPED, "concatenated", True, ALL, 0, 24, BF16),
        ((2048, 1024), ActivationType.SWIGLU, "interleaved", True, ALL, 0, 24, E4M3),
        ((2048, 1024), ActivationType.SWIGLU, "concatenated", True, ALL, 0, 24, E4M3),
        ((272, 144), ActivationType.SWIGLU_CLAMPED, "concatenated", False, ALL, 0, 24, E4M3),
        ((2048, 1024), ActivationType.GEGLU_TANH, "concatenated", True, ALL, 8, 24, E4M3),
    ],
    ids=str,
)
def test_fp8_dz(sizes, activation, gate_up, gathered, needs, spills, transposed, z_dtype):
    kernel = compile_dz(*sizes, activation, gate_up, gathered, needs, z_dtype)
    check(kernel, spills, transposed)


@pytest.mark.parametrize(
    ("activation", "gate_up", "needs", "z_dtype", "rank", "spills"),
    [
        (ActivationType.SWIGLU, "interleaved", DX, BF16, 16, 0),
        (ActivationType.SWIGLU, "interleaved", ALL, E4M3, 16, 0),
        (ActivationType.SWIGLU_CLAMPED, "interleaved", DX, BF16, 72, 0),  # 8 without adapters
        (ActivationType.SWIGLU_CLAMPED, "concatenated", DX, E4M3, 16, 64),  # 64 without adapters
        (ActivationType.GELU, "interleaved", DX, BF16, 72, 0),
    ],
    ids=str,
)
def test_adapters(activation, gate_up, needs, z_dtype, rank, spills):
    kernel = compile_dz(2048, 1024, activation, gate_up, True, needs, z_dtype, rank)
    check(kernel, spills, 24 if needs is ALL else 0)
    # Two warpgroups with 32 columns of V and A2 at a time.
    assert len(re.findall(r"m64n256k16\.f32\.bf16\.bf16", kernel.asm["ptx"])) == 2 * 2


def check(kernel, spills, transposed):
    found, ptx = report(kernel), kernel.asm["ptx"]
    assert found["spills"] <= spills, found
    assert found["bytes"] < CACHE, found
    assert found["shared"] <= Target(90, 132).shared_memory, found
    assert "m64n256k32.f32.e4m3.e4m3" in ptx
    assert not bounds_from_outside(kernel)
    # Two warpgroups with four slices each: two stores of dZᵀ, one of plain activations, one of A'ᵀ.
    assert len(re.findall(r"stmatrix\S*\.trans", ptx)) == transposed
    assert "st.shared.b8" not in ptx
