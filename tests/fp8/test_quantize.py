"""The FP8 quantizers give the bits of the reference, in memory full of NaN."""

import pytest
import torch
import triton
import triton.language as tl
from devices import on, values_on
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
from helpers import ACTIVATIONS, poisoned

from sonicmoe import ActivationType
from sonicmoe.kernels.quantize import power_of_two_scale
from sonicmoe.launch import quantize
from sonicmoe.reference import fp8

KERNELS = on("interpreter", "cuda")


@triton.jit
def _scale_kernel(bound, out, SIZE: tl.constexpr, FLOOR: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, power_of_two_scale(tl.load(bound + i), FLOOR))


@on("interpreter")
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


# --- rows of X, and weights -----------------------------------------------------------------------
@values_on(
    "tokens, hidden",
    interpreter=[(5, 77), (9, 1536), (2, 4099), (1, 16384), (67, 64), (3, 1), (0, 64)],
    cuda=[(4097, 4096), (1000, 1536), (333, 77), (129, 16384), (5, 16383), (0, 64)],
)
def test_rows(tokens, hidden, device):
    x = torch.randn(tokens, hidden) * torch.randint(-60, 60, (tokens, 1)).float().exp2()
    check_rows(x.to(device, torch.bfloat16))


@values_on(
    "shape, first, columns",
    interpreter=[((5, 100), 3, 77)],
    # Aligned rows, rows that start elsewhere in a buffer, rows on no vector.
    cuda=[((777, 2064), first, 2048) for first in (0, 8, 3)],
)
def test_rows_apart(shape, first, columns, device):
    check_rows(torch.randn(shape).to(device, torch.bfloat16)[:, first : first + columns])


@values_on("hidden", interpreter=[40], cuda=[2048])
def test_rows_of_special_values(hidden, device):
    x = torch.randn(8, hidden).to(torch.bfloat16)
    x[0], x[1, 3], x[2, -1], x[3, 0] = 0, torch.nan, torch.inf, -torch.inf
    x[4], x[5], x[6] = 1e-40, 3.3e38, -0.0  # denormal, the norm overflows, all -0
    x[7] = 1e-21  # the square of the norm is denormal
    check_rows(x.to(device))


@KERNELS
def test_every_bf16_value_rounds_like_pytorch(device):
    check_rows(all_bf16().to(device))


@KERNELS
def test_fp32_values_around_ties_round_like_pytorch(device):
    check_weight(around_ties().to(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@values_on(
    "experts, n, k",
    interpreter=[
        (3, 128, 256),
        (3, 132, 140),  # no whole tiles
        (3, 4, 68),
        (3, 300, 60),  # more than one program finds the largest magnitude
    ],
    cuda=[(5, 2048, 4096), (64, 512, 1536), (3, 1000, 264), (3, 76, 140)],
)
def test_weights(experts, n, k, transposed, dtype, device):
    w = torch.randn(experts, n, k, device=device).to(dtype)
    w *= torch.randint(-60, 60, (experts, 1, 1), device=device).float().exp2()
    check_weight(w.mT.contiguous().mT if transposed else w)


@values_on("n, k", interpreter=[(260, 68)], cuda=[(260, 68), (1000, 264)])
def test_weights_of_special_values(n, k, device):
    w = torch.randn(5, n, k)
    w[0], w[1, -1, -1], w[2, 0, 0], w[3, 7, 9] = 0, torch.nan, -torch.inf, -torch.nan
    check_weight(w.to(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@values_on(
    "sizes",
    interpreter=[
        ((16, 16), (48, 80)),  # one sample has all values
        ((272, 192), (64, 272)),  # five samples, two samples
        ((32, 4096), (128, 144)),
    ],
    cuda=[((512, 1536), (1536, 256)), ((2048, 4096), (4096, 1024)), ((272, 192), (64, 272))],
)
def test_weights_that_changed(sizes, dtype, device):
    check_scales_of_weights(sizes, dtype, device)


@on("cuda")
def test_more_than_two_to_the_31_values():
    w = torch.empty(300, 4096, 2048, dtype=torch.bfloat16, device="cuda").normal_()
    with poisoned():
        results = [
            *quantize.quantize_weight(w, True, False)[:3],
            *quantize.quantize_rows(w.view(-1, 2048), False)[:2],
        ]
    wants = [
        *fp8.quantize_weight(w[-1:].cpu(), True, False)[:3],
        *fp8.quantize_rows(w[-1].cpu(), False)[:2],
    ]
    for got, want in zip(results, wants, strict=True):
        same(got[-len(want) :], want, "the last expert")


# --- the scales of dZ -----------------------------------------------------------------------------
MANY = (0, 1, 127, 128, 129, 0, *range(512), 5000, 0)
MORE = {"inner": 1040, "dropped": 1000 - sum(MANY) % 5}


@values_on(
    "activation, counts, options",
    interpreter=[(activation, COUNTS, {}) for activation in ACTIVATIONS],
    cuda=[
        (activation, MANY, {**MORE, "is_gathered": is_gathered, "with_scores": with_scores})
        for activation in ACTIVATIONS
        for is_gathered in (True, False)
        for with_scores in (True, False)
    ],
    ids=lambda value: "" if value in (COUNTS, MANY) else str(value),
)
def test_scales(activation, counts, options, device):
    check_scales(counts, activation, **options, device=device)


@values_on(
    "counts, dropped, is_gathered, with_scores",
    interpreter=[
        (*counts, is_gathered, with_scores)
        for counts in [
            (COUNTS, 15),
            ((0, 0), 5),  # tiles of no expert
            ((0, 0), 0),  # no rows
            ((300,), 0),
            ((2, 3) * 20, 0),
        ]
        for is_gathered in (True, False)
        for with_scores in (True, False)
    ],
    cuda=[
        (*counts, True, True) for counts in [((0, 0), 5), ((0, 0), 0), ((300,), 0), ((5, 50000), 0)]
    ],
)
def test_scales_of_routings(counts, dropped, is_gathered, with_scores, device):
    options = {"is_gathered": is_gathered, "with_scores": with_scores}
    check_scales(counts, **options, dropped=dropped, device=device)


@on("interpreter")
@pytest.mark.parametrize("bad", ["zmax", "a_scale"])
def test_the_last_tile_of_many_counts(bad):
    """More tiles of an expert than a tile has rows."""
    check_scales((3, 129 * 128), bad=bad, at_the_end=True, dropped=0)


@on("interpreter")
@pytest.mark.parametrize("inner", [16, 128, 1040])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_scales_of_columns(inner, gate_up):
    check_scales(COUNTS, inner=inner, gate_up=gate_up)


@on("interpreter")
def test_scales_of_rows_alone():
    check_scales(COUNTS, columns=False)


@values_on("counts", interpreter=[COUNTS], cuda=[(100, 300, 600)])
@pytest.mark.parametrize("bad", SCALES_ARGUMENTS)
def test_scales_of_nan_and_infinity(bad, counts, device):
    check_scales(counts, bad=bad, dropped=0, device=device)


# --- what the steps between GEMMs make of them ----------------------------------------------------
@pytest.mark.parametrize("blocks", [False, True], ids=["row scales", "block scales"])
@values_on(
    "rows, columns",
    interpreter=[(19, 520), (35, 272), (1, 16), (0, 64)],
    cuda=[(1000, 520), (1000, 272), (1, 16), (0, 64)],
)
def test_rows_in_bf16(rows, columns, blocks, device):
    check_dequantized(rows, columns, device, blocks)


@KERNELS
def test_bias_gradient_of_rows_in_e4m3(device):
    check_bias_gradient(device)


@KERNELS
@pytest.mark.parametrize("gathered", [False, True], ids=["sorted", "gathered"])
@pytest.mark.parametrize(("activation", "gate_up"), KINDS)
@pytest.mark.parametrize("z_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_scored_activation(activation, gate_up, gathered, z_dtype, device):
    check_scored_activation(activation, gate_up, gathered, z_dtype, device=device)


@on("interpreter")
def test_activation_without_scores():
    check_scored_activation(ActivationType.SWIGLU, "interleaved", False, with_scores=False)
