"""The candidates that only a GPU can run compile, use the tensor cores and fit into its memory.

The plain ones run in the interpreter: tests/tuning/test_candidates.py.
"""

import pytest
import torch
from candidate_tables import candidate_tables
from machine_code import PROCESSORS, report
from test_machine_code import LAYOUTS, compile_layer

from sonicmoe.enums import ActivationType
from sonicmoe.shapes import Problem
from sonicmoe.tuning import Target, table

HOPPER = Target(90, PROCESSORS)
H, I = 264, 136  # wide enough for every tile, a multiple of none
GEMMS = ("up_kernel", "gemm_kernel", "dz_kernel", "wgrad_kernel")


def short_blocks(config):
    """Blocks of 64 are selected by default, so test_machine_code.py compiles them."""
    return config.hopper and config.block_k == 32 and config.stages > 3


@pytest.mark.parametrize(
    ("first", "activation", "other"),
    [
        (0, ActivationType.SWIGLU, False),
        (1, ActivationType.SWIGLU, True),
        (2, ActivationType.GELU, False),
    ],
    ids=["enk", "ekn and concatenated", "plain"],
)
def test_candidates_compile(first, activation, other):
    """A third of the candidates in each mode: all of them take a minute and a half."""
    problem = Problem(64, H, I, 2, 2, activation.is_gated)
    tables = candidate_tables(problem, 2, HOPPER, other, only=lambda: short_blocks)
    for candidate in tables[first::3]:
        with table.using(candidate):
            kernels = compile_layer(
                90, torch.bfloat16, activation, LAYOUTS[other], other, False, (H, I)
            )
        gemms = [k for k in kernels if k.metadata.name.endswith(GEMMS)]
        assert len(gemms) == 6
        for kernel in gemms:
            assert kernel.metadata.shared <= HOPPER.shared_memory, kernel.metadata.name
            assert report(kernel)["wgmma"], f"{kernel.metadata.name} misses tensor cores"
