"""On a GPU too, an interrupted run continues bit for bit."""

import os

import pytest
import torch
import torch.nn.functional as F

from sonicmoe_trainer import checkpoint, loop, run, runlog

pytestmark = pytest.mark.gpu

# Sequences long enough for several tiles of attention: with one there is nothing to reorder.
SHAPE = {
    "device": "cuda", "context": 512, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 64, "num_experts": 8, "intermediate_size": 128, "batch": 16, "micro_batch": 8,
    "steps": 10, "validate_every": 5, "checkpoint_every": 4, "log_every": 3,
    "deterministic": True,
}  # fmt: skip
STOP_AFTER = 6


@pytest.fixture(autouse=True)
def _cublas_can_repeat():
    """PyTorch reads this once, at the first GEMM of the process."""
    if torch.cuda.is_initialized() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        pytest.fail("set CUBLAS_WORKSPACE_CONFIG before CUDA starts, as tests/conftest.py does")


@pytest.mark.parametrize(
    "how",
    [
        {"precision": "bf16"},
        {"precision": "bf16_fp8"},
        {"precision": "bf16", "router": "token_rounding"},
        {"precision": "bf16", "router": "expert_choice"},
        {"precision": "autocast", "compile": True},
        {"precision": "bf16_fp8", "compile": True, "recompute": True},
        {"precision": "bf16", "compile": True, "context": 200},
    ],
    ids=[
        "bf16",
        "bf16-fp8",
        "bf16-token-rounding",
        "bf16-expert-choice",
        "autocast-compiled",
        "bf16-fp8-compiled-recompute",
        "bf16-compiled-200-tokens",
    ],
)
def test_a_run_continues_bit_for_bit(tiny, cache, tmp_path, stop_after, how):
    config = tiny.override({**SHAPE, **how})
    assert run.train(config, tmp_path / "whole", cache)["finished"]

    folder = tmp_path / "interrupted"
    with stop_after(STOP_AFTER):
        assert not run.train(config, folder, cache)["finished"]
    assert checkpoint.steps(folder / "checkpoints")[-1] == STOP_AFTER
    assert run.train(run.continued(folder, {}), folder, cache, resume=True)["finished"]

    curves, ends = [], []
    for name in ("whole", "interrupted"):
        records = runlog.read(tmp_path / name)
        curves.append([(r["kind"], r["step"], r["loss"]) for r in records])
        ends.append(checkpoint.load_latest(tmp_path / name / "checkpoints")["model"])
    assert curves[0] == curves[1]
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_attention_gives_the_same_gradients_twice(dtype):
    loop.make_deterministic(True)
    shape = (4, 8, 2048, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in "qkv")
    dout = torch.randn(shape, device="cuda", dtype=dtype)

    def gradients():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), dout)

    first = gradients()
    for _ in range(5):
        assert all(map(torch.equal, first, gradients()))
