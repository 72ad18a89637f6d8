"""Memory policies on a GPU: bits, errors, and bytes at the peak."""

import gc

import pytest
import torch
from helpers import Case, make_inputs, poisoned, same_bits
from memory_policies import (
    CASES,
    EXACT,
    check_against_reference,
    check_bars,
    check_not_finite,
    results,
)

from sonicmoe import ActivationType, MemoryPolicy, MoE
from sonicmoe.launch import grouped_gemm
from sonicmoe.layer.run import permute
from sonicmoe.reference.quantize import dequantize_blocks, quantize_blocks
from sonicmoe.shapes import Problem
from sonicmoe.tensors import NO_LORA
from sonicmoe.tools import cost
from sonicmoe.tuning import Target

pytestmark = pytest.mark.gpu
CUDA, MIB = "cuda", 2**20
SWIGLU, GELU = ActivationType.SWIGLU, ActivationType.GELU
# Whole tiles, N past a tile of 256 columns, all the kernels of Hopper.
HOPPER = [
    Case("777,512,272,5,3", torch.bfloat16, SWIGLU, True),
    Case("777,512,272,5,3", torch.float16, SWIGLU, True, "concatenated", True),
    Case("777,512,320,5,3", torch.bfloat16, GELU, True, routing="empty_experts"),
    Case("777,512,128,5,3", torch.bfloat16, ActivationType.RELU_SQ, routing="one_expert"),
    Case("777,512,1024,5,3", torch.bfloat16, ActivationType.SWIGLU_CLAMPED, True),
    Case("2000,2048,1024,8,2", torch.bfloat16, SWIGLU, False, "concatenated"),
]


@pytest.mark.parametrize("memory", EXACT, ids=str)
@pytest.mark.parametrize("case", [*CASES, *HOPPER], ids=str)
def test_recompute_and_slices_change_no_bit(case, memory):
    same_bits(results(case, "keep", CUDA, "triton"), results(case, memory, CUDA, "triton"))


@pytest.mark.parametrize("case", [*CASES, *HOPPER], ids=str)
def test_fp8_errs_as_the_reference(case):
    check_against_reference(case, CUDA)
    names = ("out", "db2") if case.bias else ("out",)
    if case.dtype == torch.float32:
        return  # `up` then sums in other blocks
    keep, fp8 = (results(case, memory, CUDA, "triton") for memory in ("keep", "e4m3"))
    same_bits({n: keep[n] for n in names}, {n: fp8[n] for n in names})


@pytest.mark.parametrize("arch", [89, 100])
@pytest.mark.parametrize("case", HOPPER[:4], ids=str)
def test_portable_kernels(case, arch, monkeypatch):
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: Target(arch, 100))
    check_against_reference(case, CUDA)


@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_z_in_memory(case):
    """Scales are powers of two that fit; e4m3 differs from the reference by a step at most."""
    i = make_inputs(case, CUDA)
    p = permute(i.ids, case.problem.E, dtype=case.dtype, backend="triton")
    args = (i.x, i.w1, i.b1, NO_LORA, p, case.activation, case.gate_up)
    with poisoned():
        z8, _, scale = grouped_gemm.up(*args, torch.float8_e4m3fn)
        z = grouped_gemm.up(*args, case.dtype)[0]
    concatenated = case.activation.is_gated and case.gate_up == "concatenated"
    want8, want_scale = quantize_blocks(z, concatenated)
    assert (scale == want_scale).float().mean() > 0.99
    got, want = (
        dequantize_blocks(*pair, concatenated) for pair in ((z8, scale), (want8, want_scale))
    )
    step = torch.maximum(want.abs() / 8, want_scale.mT.amax(1, True) * 2.0**-9)
    assert ((got - want).abs() <= 1.01 * step).all()
    assert ((got != want) & (scale == want_scale).all(0)[:, None]).float().mean() < 0.08  # ties


@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_gradients_with_fp8_z(gate_up):
    case = Case("4096,2048,1024,8,2", torch.bfloat16, SWIGLU, gate_up=gate_up)
    check_bars(results(case, "e4m3", CUDA, "triton"), case)


@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_token(bad, gate_up):
    check_not_finite(bad, CUDA, "triton", gate_up)


def test_another_number_of_tokens_with_cached_launches():
    moe = MoE(8, 2, 512, 256, memory=MemoryPolicy("e4m3", 2), device=CUDA, dtype=torch.bfloat16)
    for tokens in (512, 333, 1, 512):
        x = torch.randn(tokens, 512, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        with poisoned():
            out, _ = moe(x)
            out.sum().backward()
        assert out.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize(
    "memory",
    ["keep", "e4m3", "recompute", MemoryPolicy(slices=4), MemoryPolicy("e4m3", 4)],
    ids=str,
)
def test_kept_and_peak_bytes(memory):
    """At a fine-grained layer, against the cost model: the allocator rounds up to 2 MiB."""
    p = Problem.parse("32768,4096,256,256,16")
    moe = MoE(p.E, p.K, p.H, p.I, memory=memory, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(p.T, p.H, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    for _ in range(2):
        gc.collect()
        moe.zero_grad()
        x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, aux_loss = moe(x)
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        out.backward(dout)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del out, aux_loss
    policy = moe.memory
    expected = sum(cost.kept_bytes(p, memory=policy).values())
    assert expected <= kept <= expected + p.T * p.E * 2 + MIB  # the auxiliary loss keeps the logits
    assert peak <= 1.03 * cost.peak_bytes(p, memory=policy).backward + p.T * p.E * 4
    if policy.slices == 4:
        assert peak <= 3000 * MIB
