"""The FP8 GEMMs over rows, up and down, against plain PyTorch with the same arithmetic."""

import pytest
import torch
from fp8_cases import COUNTS, dequantized, random_e4m3, routed, row_error
from helpers import poisoned

from sonicmoe import ActivationType
from sonicmoe.launch import fp8
from sonicmoe.reference import fp8 as reference
from sonicmoe.reference import grouped_gemm
from sonicmoe.reference.activation import split_gate_up
from sonicmoe.tensors import NO_LORA, Lora, Weight

pytestmark = pytest.mark.gpu
CUDA = "cuda"
GATED, PLAIN = ActivationType.SWIGLU, ActivationType.RELU_SQ


def exact_up(x8, x_scale, w, b1, lora, p, activation, gate_up):
    """Z and A in fp64."""
    x, w1 = x8.double() * x_scale[:, None], w.w8.double() * w.w_scale[:, None, None]
    b1, lora = (
        None if b1 is None else b1.double(),
        Lora(*(None if t is None else t.double() for t in lora)),
    )
    return grouped_gemm.up(x, Weight(w1), b1, lora, p, activation, gate_up, x.dtype)[:2]


def reference_z(*args):
    """Z in e4m3, in fp32."""
    return reference.z_in_fp32(*reference.up(*args, torch.float8_e4m3fn)[:2], *args[6:])


def make_bias(columns, experts):
    return torch.randn(experts, columns, device=CUDA).bfloat16()


def make_lora(rows, columns, experts, rank) -> Lora:
    """U Bᵀ is of order one."""
    u = torch.randn(rows, rank, device=CUDA)
    b = torch.randn(experts, columns, rank, device=CUDA) / rank**0.5
    return Lora(u.bfloat16(), b.bfloat16())


def check_zmax_columns(z, zmax_columns, p, gate_up):
    """The largest of each column of the Z that was stored, but for its rounding to bf16."""
    largest = z.float().abs()
    if gate_up is not None:
        largest = torch.maximum(*split_gate_up(largest, gate_up))
    for e, (first, end) in enumerate(p.expert_start.unfold(0, 2, 1).tolist()):
        want = largest[first:end].amax(0) if end > first else torch.zeros_like(zmax_columns[e])
        torch.testing.assert_close(zmax_columns[e], want, rtol=2**-8, atol=0)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("sorted_rows", [False, True], ids=["gathered", "sorted"])
@pytest.mark.parametrize(
    ("activation", "gate_up", "sizes"),
    [
        (GATED, "interleaved", (272, 144)),
        (GATED, "concatenated", (272, 144)),
        (ActivationType.SWIGLU_CLAMPED, "interleaved", (512, 256)),
        (ActivationType.GEGLU, "concatenated", (512, 384)),
        (PLAIN, "interleaved", (272, 144)),
    ],
)
def test_up(counts, sorted_rows, activation, gate_up, sizes):
    check_up(counts, sorted_rows, activation, gate_up, sizes)


@pytest.mark.parametrize("sorted_rows", [False, True], ids=["gathered", "sorted"])
@pytest.mark.parametrize(("bias", "rank"), [(True, 0), (False, 8), (True, 40), (True, 136)])
@pytest.mark.parametrize(
    ("activation", "gate_up", "sizes"),
    [
        (GATED, "interleaved", (272, 144)),
        (ActivationType.SWIGLU_CLAMPED, "concatenated", (272, 144)),
        (PLAIN, "interleaved", (512, 144)),
    ],
)
def test_up_with_biases_and_adapters(activation, gate_up, sizes, bias, rank, sorted_rows):
    check_up(COUNTS[-1], sorted_rows, activation, gate_up, sizes, bias, rank)


def check_up(counts, sorted_rows, activation, gate_up, sizes, bias=False, rank=0):
    hidden, inner = sizes
    p = routed(counts, sorted_rows, CUDA)
    tokens = sum(counts)
    x8, x_scale = random_e4m3(tokens, hidden), 2.0 ** torch.randint(-12, 4, (tokens,), device=CUDA)
    columns = 2 * inner if activation.is_gated else inner
    w1, w_scale = random_e4m3(len(counts), columns, hidden), torch.full((len(counts),), 2.0**-9)
    b1 = make_bias(columns, len(counts)) if bias else None
    lora = make_lora(p.rows_of(x8), columns, len(counts), rank) if rank else NO_LORA
    w = Weight(None, w1, None, w_scale.to(CUDA))
    args = (x8, x_scale.float(), w, b1, lora, p, activation, gate_up)
    _, zmax, _, a, a_scale = reference.up(*args, torch.bfloat16)
    with poisoned():
        got, in_e4m3, without_z = (
            fp8.up(*args, z_dtype) for z_dtype in (torch.bfloat16, torch.float8_e4m3fn, None)
        )
    exact = exact_up(*args)
    assert row_error(got[0], exact[0]) < 0.005  # bf16 rounds by 0.17%, the accumulator by 0.1%
    torch.testing.assert_close(got[1], zmax, rtol=5e-3, atol=0)
    check_zmax_columns(got[0], got[2], p, gate_up if activation.is_gated else None)
    assert (got[4] != a_scale).float().mean() < 0.01  # a maximum next to a power of two
    values = [dequantized(q, scale) for q, scale in ((a, a_scale), got[3:])]
    want, found = (row_error(value, exact[1]) for value in values)
    assert found <= 1.1 * want
    assert without_z[:3] == (None, None, None)
    assert torch.equal(in_e4m3[1], got[1]) and torch.equal(in_e4m3[2], got[2])
    z = reference.z_in_fp32(*in_e4m3[:2], activation, gate_up)
    assert row_error(z, exact[0]) <= 1.1 * row_error(reference_z(*args), exact[0])
    for other in (in_e4m3, without_z):
        assert torch.equal(other[3].view(torch.uint8), got[3].view(torch.uint8))
        assert torch.equal(other[4], got[4])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("sizes", [(272, 144), (512, 256), (1024, 1024), (128, 640)])
@pytest.mark.parametrize("blocks", [False, True], ids=["row scales", "block scales"])
@pytest.mark.parametrize("block_n", [128, 256])
def test_gemm(counts, sizes, blocks, block_n):
    check_gemm(counts, sizes, blocks, block_n)


@pytest.mark.parametrize("sizes", [(272, 144), (1024, 1024)])
@pytest.mark.parametrize("blocks", [False, True], ids=["row scales", "block scales"])
@pytest.mark.parametrize("block_n", [128, 256])
@pytest.mark.parametrize("scores", [False, True], ids=["", "scores"])
@pytest.mark.parametrize(("bias", "rank"), [(True, 0), (False, 8), (True, 40), (True, 136)])
def test_gemm_with_biases_and_adapters(sizes, blocks, block_n, bias, rank, scores):
    check_gemm(COUNTS[-1], sizes, blocks, block_n, bias, rank, scores)


def check_gemm(counts, sizes, blocks, block_n, bias=False, rank=0, with_scores=False):
    columns, depth = sizes
    rows = sum(counts)
    p = routed(counts, True, CUDA)
    a = random_e4m3(rows, depth)
    planes = -(-depth // 128) if blocks else 1
    a_scale = 2.0 ** torch.randint(-12, 4, (planes, rows), device=CUDA).float()
    w, w_scale = random_e4m3(len(counts), columns, depth), torch.full((len(counts),), 2.0**-7)
    b2 = make_bias(columns, len(counts)) if bias else None
    lora = make_lora(rows, columns, len(counts), rank) if rank else NO_LORA
    scores = torch.rand(rows, device=CUDA) if with_scores else None
    args = (a, a_scale, Weight(None, w, None, w_scale.to(CUDA)), b2, scores, lora, p)
    with poisoned():
        got = fp8.down(*args, block_n=block_n)
    # bf16 rounds by 0.17%, the accumulator by 0.13%.
    assert row_error(got, reference.down(*args)) < 0.005


def test_gemm_multiplies_by_the_scores():
    p = routed((100, 28), True, CUDA)
    w = Weight(None, random_e4m3(2, 256, 256), None, torch.ones(2, device=CUDA))
    args = (random_e4m3(128, 256), torch.ones(2, 128, device=CUDA), w)
    scores = torch.rand(128, device=CUDA)
    want = fp8.down(*args, None, None, NO_LORA, p).float() * scores[:, None]
    got = fp8.down(*args, None, scores, NO_LORA, p).float()
    torch.testing.assert_close(got, want, rtol=0.01, atol=0)
