"""`sonicmoe.report` names the kernels that a GPU runs."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sonicmoe import MemoryPolicy, MoE, report
from sonicmoe.layer.meta import BATCHES

pytestmark = pytest.mark.gpu
CASES = {
    "bf16": {},
    "fp32": {"dtype": torch.float32},
    "biases": {"add_bias": True},
    "fp8": {"precision": "fp8"},
    "recompute, slices": {"memory": MemoryPolicy("recompute", 2)},
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_those_that_ran(case):
    """As often as they ran; every grouped GEMM that ran is in the report."""
    options = {"dtype": torch.bfloat16, **CASES[case]}
    if case == "fp8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 needs compute capability 9.0")
    moe = MoE(16, 4, 256, 128, aux_loss_coef=0.0, device="cuda", **options)
    (layer,) = report(moe).layers
    x = torch.randn(BATCHES[-1], 256, device="cuda", dtype=options["dtype"], requires_grad=True)
    moe(x)[0].sum().backward()  # compiles
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        moe(x)[0].sum().backward()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    ran = Counter(e.name for e in profiler.events() if e.device_type == on_gpu)
    said = Counter((*layer.forward, *layer.backward))
    assert {name: ran[name] for name in said} == dict(said)
    gemms = ("gemm_kernel", "up_kernel", "dz_kernel", "wgrad_kernel")
    assert {name for name in ran if name.endswith(gemms)} <= set(said)
    assert layer.fast and layer.device == "cuda:0"
