"""The kernels of token rounding as compiled for GPUs that are not here."""

import itertools

import pytest
import torch
from machine_code import compiling, report

from sonicmoe.launch.token_rounding import round_logits, round_logits_backward, round_tokens
from sonicmoe.reference.token_rounding import SUBROUTINES


def compiled_for(arch, subroutine, tokens=512, experts=64, k=4, tile=128):
    ids = torch.zeros(tokens, k, dtype=torch.int32)
    with compiling(arch) as compiled:
        round_tokens(torch.zeros(tokens, experts), ids, tile, subroutine, torch.zeros(experts))
    return compiled


def compiled_with_softmax(arch, experts, normalize, dtype=torch.bfloat16, tokens=512, k=4):
    logits = torch.zeros(tokens, experts, dtype=dtype)
    ids = torch.zeros(tokens, k, dtype=torch.int32)
    with compiling(arch) as compiled:
        expert, _, score, start, *_ = round_logits(logits, ids, normalize, 128, "nr-f", None)
        round_logits_backward(score, logits, ids if normalize else None, expert, start)
    return compiled


def assert_no_spills(kernel):
    found = report(kernel)
    assert found["spills"] == 0, f"{kernel.metadata.name} spills: {found}"
    return found


@pytest.mark.parametrize(
    ("arch", "subroutine"),
    [*((90, name) for name in SUBROUTINES), (80, "nr-f"), (100, "nr-f")],
)
def test_no_spills(arch, subroutine):
    compiled = compiled_for(arch, subroutine, experts=256)
    assert len(compiled) == 3
    for kernel in compiled:
        assert_no_spills(kernel)


def test_two_experts_at_once_on_a_processor():
    """65536 registers hold two programs of 256 threads with 128 each."""
    _, select, _ = compiled_for(90, "nr-f", tokens=16384, experts=256)
    assert assert_no_spills(select)["registers"] * 32 * select.metadata.num_warps <= 65536 // 2


@pytest.mark.parametrize(
    ("experts", "normalize", "dtype"),
    [
        (64, False, torch.bfloat16),
        (64, True, torch.float32),
        (256, False, torch.float32),
        (256, True, torch.bfloat16),
        *itertools.product([4096], [False, True], [torch.bfloat16, torch.float32]),
    ],
)
def test_rows_fit_the_registers(experts, normalize, dtype):
    keys, _, _, gradient = compiled_with_softmax(90, experts, normalize, dtype)
    assert_no_spills(keys)
    assert_no_spills(gradient)


@pytest.mark.parametrize("subroutine", ["nr-s", "balance-f"])
def test_ones_that_triton_takes_as_constants(subroutine):
    assert len(compiled_for(90, subroutine, experts=1, k=1, tile=1)) == 3
    assert len(compiled_with_softmax(90, 1, True, tokens=1, k=1)) == 4


def test_another_number_of_tokens_compiles_nothing():
    first, *others = (compiled_for(90, "nr-f", tokens) for tokens in (512, 333, 1, 4096))
    for other in others:
        assert all(a is b for a, b in zip(first, other, strict=True))
    first, *others = (compiled_with_softmax(90, 64, True, tokens=t) for t in (512, 333, 1))
    for other in others:
        assert all(a is b for a, b in zip(first, other, strict=True))
