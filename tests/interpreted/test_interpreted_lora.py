"""GEMMs with an adapter: every activation, layout and storage, in memory full of NaN."""

import pytest
import torch
from adapters import TENSORS, check_layout, check_lora
from helpers import ACTIVATIONS, Case

from sonicmoe.launch import grouped_gemm
from sonicmoe.tuning import Target

TINY = "33,24,8,3,2"


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_every_gradient_is_within_the_budget(activation, gate_up):
    if gate_up == "concatenated" and not activation.is_gated:
        pytest.skip("a plain activation has no gate")
    transposed = gate_up == "concatenated"
    case = Case(TINY, torch.bfloat16, activation, not transposed, gate_up, transposed, "dropped")
    check_lora(case, 16, "cpu", "triton")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("rank", [3, 24, 40])
def test_ranks(dtype, rank):
    """Less than a block, one that is no power of two, more than a block."""
    check_lora(Case("40,24,16,3,2", dtype, bias=True, routing="zipf"), rank, "cpu", "triton")


@pytest.mark.parametrize(
    ("shape", "routing"),
    [("0,16,8,3,2", "uniform"), ("6,16,8,3,2", "all_dropped"), ("13,40,16,5,2", "empty_experts")],
)
def test_shapes_and_routings(shape, routing):
    check_lora(Case(shape, bias=True, routing=routing), 8, "cpu", "triton")


@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_more_columns_than_a_tile(gate_up):
    """H and N past the widest tile, neither a multiple of it."""
    check_lora(Case("24,264,136,4,2", bias=True, gate_up=gate_up), 16, "cpu", "triton")


@pytest.mark.parametrize("arch", [80, 86])
def test_configurations_of_other_devices(arch, monkeypatch):
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: Target(arch, 4))
    check_lora(
        Case(TINY, bias=True, gate_up="concatenated", routing="dropped"), 16, "cpu", "triton"
    )


@pytest.mark.parametrize("layout", ["strided", "expanded", "first dimension last"])
def test_tensors_in_any_layout(layout):
    check_layout(TENSORS, layout, "triton")
