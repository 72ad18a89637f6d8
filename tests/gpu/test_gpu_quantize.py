"""The FP8 quantizers give the bits of the reference, in memory full of NaN."""

import pytest
import torch
from fp8_checks import (
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

from sonicmoe.launch import quantize
from sonicmoe.reference import fp8

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.mark.parametrize(
    ("tokens", "hidden"), [(4097, 4096), (1000, 1536), (333, 77), (129, 16384), (5, 16383), (0, 64)]
)
def test_rows(tokens, hidden):
    x = torch.randn(tokens, hidden) * torch.randint(-60, 60, (tokens, 1)).float().exp2()
    check_rows(x.to(CUDA, torch.bfloat16))


@pytest.mark.parametrize("first", [0, 8, 3])
def test_rows_apart(first):
    """Aligned rows, rows that start elsewhere in a buffer, rows on no vector."""
    check_rows(torch.randn(777, 2064).to(CUDA, torch.bfloat16)[:, first : first + 2048])


def test_rows_of_special_values():
    x = torch.randn(8, 2048).to(torch.bfloat16)
    x[0], x[1, 3], x[2, 2047], x[3, 0] = 0, torch.nan, torch.inf, -torch.inf
    x[4], x[5], x[6] = 1e-40, 3.3e38, -0.0  # denormal, the norm overflows, all -0
    x[7] = 1e-21  # the square of the norm is denormal
    check_rows(x.to(CUDA))


def test_values_round_like_pytorch():
    check_rows(all_bf16().to(CUDA))
    check_weight(around_ties().to(CUDA))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize(
    ("experts", "n", "k"), [(5, 2048, 4096), (64, 512, 1536), (3, 1000, 264), (3, 76, 140)]
)
def test_weights(experts, n, k, transposed, dtype):
    w = torch.randn(experts, n, k, device=CUDA).to(dtype)
    w *= torch.randint(-60, 60, (experts, 1, 1), device=CUDA).float().exp2()
    w[0, 0, 0], w[1, -1, -1], w[2] = torch.nan, -torch.inf, 0
    check_weight(w.mT.contiguous().mT if transposed else w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "sizes",
    [((512, 1536), (1536, 256)), ((2048, 4096), (4096, 1024)), ((272, 192), (64, 272))],
)
def test_weights_that_changed(sizes, dtype):
    check_scales_of_weights(sizes, dtype, CUDA)


def test_more_than_two_to_the_31_values():
    w = torch.empty(300, 4096, 2048, dtype=torch.bfloat16, device=CUDA).normal_()
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


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
@pytest.mark.parametrize("is_gathered", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize("with_scores", [True, False])
def test_scales(activation, is_gathered, with_scores):
    counts = (0, 1, 127, 128, 129, 0, *range(512), 5000, 0)
    dropped = 1000 - sum(counts) % 5
    options = {"is_gathered": is_gathered, "with_scores": with_scores}
    check_scales(counts, activation, **options, dropped=dropped, inner=1040, device=CUDA)


@pytest.mark.parametrize(
    ("counts", "dropped"), [((0, 0), 5), ((0, 0), 0), ((300,), 0), ((5, 50000), 0)]
)
def test_scales_of_few_experts(counts, dropped):
    check_scales(counts, dropped=dropped, device=CUDA)


@pytest.mark.parametrize("bad", SCALES_ARGUMENTS)
def test_scales_of_nan_and_infinity(bad):
    check_scales((100, 300, 600), bad=bad, dropped=0, device=CUDA)


@pytest.mark.parametrize("blocks", [False, True], ids=["row scales", "block scales"])
@pytest.mark.parametrize(("rows", "columns"), [(1000, 520), (1000, 272), (1, 16), (0, 64)])
def test_rows_in_bf16(rows, columns, blocks):
    check_dequantized(rows, columns, CUDA, blocks)


def test_bias_gradient_of_rows_in_e4m3():
    check_bias_gradient(CUDA)


@pytest.mark.parametrize("gathered", [False, True], ids=["sorted", "gathered"])
@pytest.mark.parametrize(("activation", "gate_up"), KINDS)
@pytest.mark.parametrize("z_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_scored_activation(activation, gate_up, gathered, z_dtype):
    check_scored_activation(activation, gate_up, gathered, z_dtype, device=CUDA)
