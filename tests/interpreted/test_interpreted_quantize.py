"""The FP8 quantizers give the bits of the reference, in memory full of NaN."""

import pytest
import torch
import triton
import triton.language as tl
from fp8_checks import (
    COUNTS,
    KINDS,
    SCALES_ARGUMENTS,
    all_bf16,
    around_ties,
    check_bias_gradient,
    check_dequantized,
    check_rows,
    check_scales,
    check_scales_of_weights,
    check_scored_activation,
    check_weight,
    same,
)
from helpers import ACTIVATIONS

from sonicmoe import ActivationType
from sonicmoe.kernels.quantize import power_of_two_scale
from sonicmoe.reference import fp8


@triton.jit
def _scale_kernel(bound, out, SIZE: tl.constexpr, FLOOR: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, power_of_two_scale(tl.load(bound + i), FLOOR))


def test_scales_of_all_exponents():
    """The bounds with each exponent that round to 448·s, those next to them, and NaN."""
    exponent = torch.arange(256, dtype=torch.int32)[:, None] << 23
    fraction = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF, 0x400000, 0x12345])
    bound = (exponent + fraction).to(torch.int32).view(torch.float32).flatten()
    bound[-1] = -torch.nan
    for floor in (1, 57):
        out = torch.empty_like(bound)
        _scale_kernel[(1,)](bound, out, SIZE=len(bound), FLOOR=floor)
        same(out, fp8.power_of_two_scale(bound, floor), "scale")


@pytest.mark.parametrize(
    ("tokens", "hidden"), [(5, 77), (9, 1536), (2, 4099), (1, 16384), (67, 64), (3, 1), (0, 64)]
)
def test_rows(tokens, hidden):
    x = torch.randn(tokens, hidden) * torch.randint(-60, 60, (tokens, 1)).float().exp2()
    check_rows(x.to(torch.bfloat16))


def test_rows_apart():
    check_rows(torch.randn(5, 100).to(torch.bfloat16)[:, 3:80])


def test_rows_of_special_values():
    x = torch.randn(8, 40).to(torch.bfloat16)
    x[0], x[1, 3], x[2, 39], x[3, 0] = 0, torch.nan, torch.inf, -torch.inf
    x[4], x[5], x[6] = 1e-40, 3.3e38, -0.0  # denormal, the norm overflows, all -0
    x[7] = 1e-21  # the square of the norm is denormal
    check_rows(x)


def test_every_bf16_value_rounds_like_pytorch():
    check_rows(all_bf16())


def test_fp32_values_around_ties_round_like_pytorch():
    check_weight(around_ties())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (128, 256),
        (132, 140),  # no whole tiles
        (4, 68),
        (300, 60),  # more than one program finds the largest magnitude
    ],
)
def test_weights(n, k, transposed, dtype):
    w = torch.randn(3, n, k) * torch.tensor([1e-30, 1.0, 1e20]).view(3, 1, 1)
    w = w.to(dtype)
    check_weight(w.mT.contiguous().mT if transposed else w)


def test_weights_of_special_values():
    w = torch.randn(5, 260, 68)
    w[0], w[1, 259, 67], w[2, 0, 0], w[3, 7, 9] = 0, torch.nan, -torch.inf, -torch.nan
    check_weight(w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "sizes",
    [
        ((16, 16), (48, 80)),  # one sample has all values
        ((272, 192), (64, 272)),  # five samples, two samples
        ((32, 4096), (128, 144)),
    ],
)
def test_weights_that_changed(sizes, dtype):
    check_scales_of_weights(sizes, dtype, "cpu")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
def test_scales(activation):
    check_scales(COUNTS, activation)


@pytest.mark.parametrize("with_scores", [True, False])
@pytest.mark.parametrize("is_gathered", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize(
    ("counts", "dropped"),
    [
        (COUNTS, 15),
        ((0, 0), 5),  # tiles of no expert
        ((0, 0), 0),  # no rows
        ((300,), 0),
        ((2, 3) * 20, 0),
    ],
)
def test_scales_of_routings(counts, dropped, is_gathered, with_scores):
    check_scales(counts, is_gathered=is_gathered, with_scores=with_scores, dropped=dropped)


@pytest.mark.parametrize("bad", ["zmax", "a_scale"])
def test_the_last_tile_of_many_counts(bad):
    """More tiles of an expert than a tile has rows."""
    check_scales((3, 129 * 128), bad=bad, at_the_end=True, dropped=0)


@pytest.mark.parametrize("inner", [16, 128, 1040])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_scales_of_columns(inner, gate_up):
    check_scales(COUNTS, inner=inner, gate_up=gate_up)


def test_scales_of_rows_alone():
    check_scales(COUNTS, columns=False)


@pytest.mark.parametrize("bad", SCALES_ARGUMENTS)
def test_scales_of_nan_and_infinity(bad):
    check_scales(COUNTS, bad=bad, dropped=0)


@pytest.mark.parametrize("blocks", [False, True], ids=["row scales", "block scales"])
@pytest.mark.parametrize(("rows", "columns"), [(19, 520), (35, 272), (1, 16), (0, 64)])
def test_rows_in_bf16(rows, columns, blocks):
    check_dequantized(rows, columns, blocks=blocks)


def test_bias_gradient_of_rows_in_e4m3():
    check_bias_gradient()


@pytest.mark.parametrize("gathered", [False, True], ids=["sorted", "gathered"])
@pytest.mark.parametrize(("activation", "gate_up"), KINDS)
@pytest.mark.parametrize("z_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_scored_activation(activation, gate_up, gathered, z_dtype):
    check_scored_activation(activation, gate_up, gathered, z_dtype)


def test_activation_without_scores():
    check_scored_activation(ActivationType.SWIGLU, "interleaved", False, with_scores=False)
