"""The portable kernels of the memory policies, in memory full of NaN."""

from dataclasses import replace

import pytest
import torch
from helpers import Case, make_inputs, same_bits
from memory_policies import CASES, EXACT, check_against_reference, check_not_finite, results
from value_checks import check_values

from sonicmoe import MemoryPolicy
from sonicmoe.launch import grouped_gemm
from sonicmoe.layer.run import permute
from sonicmoe.reference.quantize import dequantize_blocks, quantize_blocks
from sonicmoe.tensors import NO_LORA


def of_tokens(case, tokens):
    """At most so many: a kernel that combines takes one program for each."""
    return replace(case, shape=case.shape.replace("128,", f"{tokens},", 1))


@pytest.mark.parametrize(("number", "case"), enumerate(CASES), ids=str)
def test_recompute_and_slices_change_no_bit(number, case):
    case, (*alone, together) = of_tokens(case, 24), EXACT
    keep = results(case, "keep", backend="triton")
    for memory in (alone[number % len(alone)], together):
        same_bits(keep, results(case, memory, backend="triton"))


@pytest.mark.parametrize("case", [c for c in CASES if c.problem.T > 1], ids=str)
def test_fp8_errs_as_the_reference(case):
    check_against_reference(of_tokens(case, 64))


@pytest.mark.parametrize(
    "values", ["rows_100", "channels_30", "weights_300", "log_normal", "huge", "zero_rows"]
)
def test_fp8_with_values_of_trained_models(values):
    check_values(Case("64,32,72,3,2", values=values), backend="triton", memory="e4m3")


def test_slices_and_fp8_together():
    case = of_tokens(CASES[1], 24)
    fp8 = results(case, "e4m3", backend="triton")
    same_bits(fp8, results(case, MemoryPolicy("e4m3", 3), backend="triton"))


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_z_is_quantized_as_the_reference_does(case):
    """A 16-bit reference rounds Z first: e4m3 may then differ by one step, from a tie."""
    i = make_inputs(case)
    p = permute(i.ids, case.problem.E, dtype=case.dtype, backend="triton")
    args = (i.x, i.w1, i.b1, NO_LORA, p, case.activation, case.gate_up)
    z8, _, scale = grouped_gemm.up(*args, torch.float8_e4m3fn)
    z, _, none = grouped_gemm.up(*args, case.dtype)
    assert none is None
    used = int(p.expert_start[-1])
    concatenated = case.activation.is_gated and case.gate_up == "concatenated"
    want8, want_scale = quantize_blocks(z[:used], concatenated)
    assert (scale[:, :used] == want_scale).float().mean() > 0.99
    got = dequantize_blocks(z8[:used], scale[:, :used], concatenated)
    want = dequantize_blocks(want8, want_scale, concatenated)
    step = torch.maximum(want.abs() / 8, want_scale.mT.amax(1, True) * 2.0**-9)
    assert ((got - want).abs() <= 1.01 * step).all()
    if case.dtype == torch.float32:
        assert torch.equal(got, want)


@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_token(bad, gate_up):
    check_not_finite(bad, "cpu", "triton", gate_up)


def test_older_gpus_refuse_fp8(monkeypatch):
    older = grouped_gemm.target_of(torch.empty(0))._replace(arch=80)
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: older)
    with pytest.raises(ValueError, match=r"memory: expected 'keep' or 'recompute' .* 8\.0"):
        results(CASES[0], "e4m3", backend="triton")
