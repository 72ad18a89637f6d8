"""What the memory policies compute: bits, errors, what they keep on a GPU."""

import gc
from dataclasses import replace

import pytest
import torch
from devices import on, values_on
from helpers import ACTIVATIONS, Case, make_inputs, poisoned, same_bits
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
from sonicmoe.tensors import NO_LORA, Weight
from sonicmoe.tools import cost
from sonicmoe.tuning import Target

BF16, MIB = torch.bfloat16, 2**20
SWIGLU, GELU = ActivationType.SWIGLU, ActivationType.GELU
# Whole tiles, N past a tile of 256 columns, all the kernels of Hopper.
HOPPER = [
    Case("777,512,272,5,3", BF16, SWIGLU, True),
    Case("777,512,272,5,3", torch.float16, SWIGLU, True, "concatenated", True),
    Case("777,512,320,5,3", BF16, GELU, True, routing="empty_experts"),
    Case("777,512,128,5,3", BF16, ActivationType.RELU_SQ, routing="one_expert"),
    Case("777,512,1024,5,3", BF16, ActivationType.SWIGLU_CLAMPED, True),
    Case("2000,2048,1024,8,2", BF16, SWIGLU, False, "concatenated"),
]


def of_tokens(case, tokens):
    """At most so many: an interpreted kernel that combines takes one program for each."""
    return replace(case, shape=case.shape.replace("128,", f"{tokens},", 1))


@values_on(
    "case, policies",
    cpu=[(case, EXACT) for case in CASES],
    interpreter=[
        (of_tokens(case, 24), (EXACT[i % (len(EXACT) - 1)], EXACT[-1]))
        for i, case in enumerate(CASES)
    ],
    cuda=[(case, EXACT) for case in (*CASES, *HOPPER)],
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
def test_recompute_and_slices_change_no_bit(case, policies, device, backend):
    keep = results(case, "keep", device, backend)
    for memory in policies:
        same_bits(keep, results(case, memory, device, backend))


@on("interpreter")
def test_slices_and_fp8_together():
    case = of_tokens(CASES[1], 24)
    fp8 = results(case, "e4m3", backend="triton")
    same_bits(fp8, results(case, MemoryPolicy("e4m3", 3), backend="triton"))


@values_on(
    "case",
    interpreter=[of_tokens(case, 64) for case in CASES if case.problem.T > 1],
    cuda=[*CASES, *HOPPER],
)
def test_fp8_errs_as_the_reference(case, device):
    check_against_reference(case, device)
    # In fp32 `up` sums in other blocks. The interpreter is slow, and it has no other kernels here.
    if device == "cuda" and case.dtype != torch.float32:
        _same_output(case, device, "triton")


def _same_output(case, device, backend) -> dict:
    """The results with Z in e4m3; the output, and db2, have the bits of "keep"."""
    keep, fp8 = (results(case, memory, device, backend) for memory in ("keep", "e4m3"))
    names = ("out", "db2") if case.bias else ("out",)
    same_bits({n: keep[n] for n in names}, {n: fp8[n] for n in names})
    return fp8


ROUTINGS = ("uniform", "empty_experts", "one_expert", "dropped")
FORMS = [
    (activation, gate_up)
    for activation in ACTIVATIONS
    for gate_up in ("interleaved", "concatenated")
    if not activation.clamp and (activation.is_gated or gate_up == "interleaved")
]


@values_on(
    "case",
    cpu=[  # Every form without and with biases, every routing with both of a gate's layouts.
        pytest.param(
            Case("256,64,136,5,3", BF16, activation, bias, gate_up, routing=ROUTINGS[routing]),
            marks=[pytest.mark.slow] * bias,
        )
        for i, (activation, gate_up) in enumerate(FORMS)
        for bias in (False, True)
        for routing in [(i + 2 * bias) % 4]
    ],
    cuda=[
        Case("4096,2048,1024,8,2", BF16, SWIGLU, gate_up=gate_up)
        for gate_up in ("interleaved", "concatenated")
    ],
)
def test_gradients_with_fp8_z(case, device, backend):
    check_bars(_same_output(case, device, backend), case)


@on("cuda")
@pytest.mark.parametrize("arch", [89, 100])
@pytest.mark.parametrize("case", HOPPER[:4], ids=str)
def test_portable_kernels(case, arch, monkeypatch):
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: Target(arch, 100))
    check_against_reference(case, "cuda")


@values_on("case", interpreter=CASES[:4], cuda=HOPPER)
def test_z_is_quantized_as_the_reference_does(case, device):
    """A 16-bit reference rounds Z first: e4m3 may then differ by one step, from a tie."""
    i = make_inputs(case, device)
    p = permute(i.ids, case.problem.E, dtype=case.dtype, backend="triton")
    args = (i.x, Weight(i.w1), i.b1, NO_LORA, p, case.activation, case.gate_up)
    with poisoned():
        z8, _, scale = grouped_gemm.up(*args, torch.float8_e4m3fn)
        z, _, none = grouped_gemm.up(*args, case.dtype)
    assert none is None
    used = int(p.expert_start[-1])
    scale = scale[:, :used]
    concatenated = case.activation.is_gated and case.gate_up == "concatenated"
    want8, want_scale = quantize_blocks(z[:used], concatenated)
    same_scale = scale == want_scale
    assert same_scale.float().mean() > 0.99
    got = dequantize_blocks(z8[:used], scale, concatenated)
    want = dequantize_blocks(want8, want_scale, concatenated)
    step = torch.maximum(want.abs() / 8, want_scale.mT.amax(1, True) * 2.0**-9)
    assert ((got - want).abs() <= 1.01 * step).all()
    ties = ((got != want) & same_scale.all(0)[:, None]).float().mean()
    assert ties < 0.08
    if case.dtype == torch.float32:
        assert torch.equal(got, want)


@on("cpu", "interpreter", "cuda")
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_token(bad, gate_up, device, backend):
    check_not_finite(bad, device, backend, gate_up)


@on("interpreter")
def test_older_gpus_refuse_fp8(monkeypatch):
    older = grouped_gemm.target_of(torch.empty(0))._replace(arch=80)
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: older)
    with pytest.raises(ValueError, match=r"memory: expected 'keep' or 'recompute' .* 8\.0"):
        results(CASES[0], "e4m3", backend="triton")


@on("cuda")
def test_another_number_of_tokens_with_cached_launches():
    moe = MoE(8, 2, 512, 256, memory=MemoryPolicy("e4m3", 2), device="cuda", dtype=torch.bfloat16)
    for tokens in (512, 333, 1, 512):
        x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with poisoned():
            out, _ = moe(x)
            out.sum().backward()
        assert out.isfinite().all() and x.grad.isfinite().all()


@on("cuda")
@pytest.mark.parametrize(
    "memory",
    ["keep", "e4m3", "recompute", MemoryPolicy(slices=4), MemoryPolicy("e4m3", 4)],
    ids=str,
)
def test_kept_and_peak_bytes(memory):
    """At a fine-grained layer, against the cost model: the allocator rounds up to 2 MiB."""
    p = Problem.parse("32768,4096,256,256,16")
    moe = MoE(p.E, p.K, p.H, p.I, memory=memory, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(p.T, p.H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
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
