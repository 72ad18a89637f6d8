"""The kernels of a build for the Hugging Face `kernels` loader, beside those of the package."""

import sys
from functools import partial

import torch
from helpers import Case, make_inputs, ours, run, same_bits
from hub_builds import load

from sonicmoe.integrations import hub


def test_kernels_of_two_builds(tmp_path):
    """The same bits, from modules of its own."""
    hub.build(tmp_path)
    kernel = load(tmp_path)
    case = Case("33,24,8,3,2", torch.bfloat16, bias=True, routing="dropped")
    given = make_inputs(case)
    same_bits(
        run(ours(case, "triton"), given), run(partial(kernel.experts, backend="triton"), given)
    )
    assert f"{kernel.__name__}.kernels.triton.gemm" in sys.modules
