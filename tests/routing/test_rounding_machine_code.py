"""The kernels of token rounding as compiled for GPUs that are not here."""

import pytest
import torch
from machine_code import compiling, report

from sonicmoe.ops.launch_token_rounding import round_tokens


def compiled_for(arch, subroutine, tokens=512, experts=64, k=4, tile=128):
    ids = torch.zeros(tokens, k, dtype=torch.int32)
    with compiling(arch) as compiled:
        round_tokens(torch.zeros(tokens, experts), ids, tile, subroutine, torch.zeros(experts))
    return compiled


@pytest.mark.parametrize(
    ("arch", "subroutine"),
    [(90, "nr-f"), (90, "nr-s"), (80, "nr-f"), (100, "nr-f")],
)
def test_no_spills(arch, subroutine):
    compiled = compiled_for(arch, subroutine)
    assert len(compiled) == 4
    for kernel in compiled:
        found = report(kernel)
        assert found["LDL"] == found["STL"] == 0, f"{kernel.metadata.name} spills: {found}"


@pytest.mark.parametrize("subroutine", ["nr-s", "balance-f"])
def test_ones_that_triton_takes_as_constants(subroutine):
    assert len(compiled_for(90, subroutine, experts=1, k=1, tile=1)) == 4


def test_another_number_of_tokens_compiles_nothing():
    first, *others = (compiled_for(90, "nr-f", tokens) for tokens in (512, 333, 1, 4096))
    for other in others:
        assert all(a is b for a, b in zip(first, other, strict=True))
