"""benchmarks/training_step.py whole, at toy size, and its table and picture."""

import json
import math
from pathlib import Path

import pytest
import torch
import training_step as script
from research import training_step
from research.results import read

TOY = {
    "vocab_size": 64, "context": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 16, "num_experts": 4, "experts_per_token": 2, "loss_chunk": 0,
    "intermediate_size": 16, "micro_batch": 2, "device": "cpu",
}  # fmt: skip
COMMON = ["--preset", "demo", "--no-compile", "--commit", "abc"]
COMMON += [word for key, value in TOY.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(autouse=True)
def _determinism_as_before():
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


@pytest.fixture
def tokens(tmp_path) -> Path:
    """A text that repeats, so that 60 steps learn it."""
    path = tmp_path / "train.tokens"
    path.write_bytes(b"".join((i % 61).to_bytes(4, "little") for i in range(4000)))
    return path


def test_a_step_is_timed(tmp_path, capsys):
    results = tmp_path / "results"
    arguments = [*COMMON, "--micro-batches", "3", "--steps", "2", "--results", str(results)]
    for backend in ("torch", "grouped_mm"):
        assert script.main([*arguments, "--backend", backend, "--precision", "bf16"]) == 0
    first, second = read(results)
    assert (first["backend"], second["backend"]) == ("torch", "grouped_mm")
    for r in (first, second):
        assert r["kind"] == "training step"
        assert (r["micro_batches"], r["layers"], r["tokens_per_micro_batch"]) == (3, 2, 64)
        assert r["step_ms"] == pytest.approx(3 * r["micro_batch_ms"] + r["update_ms"], rel=1e-3)
        rate = 3 * 64 / r["step_ms"] * 1e3
        assert r["tokens_per_second"] == pytest.approx(rate, rel=1e-3)
        assert r["last_loss"] == pytest.approx(math.log(64), rel=0.2)
        assert r["commit"] == "abc" and str(tmp_path) not in r["command"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["text"] == "random"


def test_kernels_are_told_apart_by_their_names():
    ours = training_step.kernel_names()
    assert {"adamw_kernel", "cross_entropy_kernel", "combine_kernel"} <= ours
    for kernel, part in {
        "adamw_kernel": "optimizer",
        "void at::native::multi_tensor_apply_kernel<LpNorm>": "optimizer",
        "cross_entropy_kernel": "head and loss",
        "combine_kernel": "MoE kernels",
        "_scatter2scatter": "MoE kernels", "_groupXtY": "MoE kernels", "_group": "MoE kernels",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape>>":
            "MoE kernels",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
        "triton_tem_fused_flex_attention_2": "attention",
        "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NNT": "dense GEMMs",
        "void cublasLt::splitKreduce_kernel<32, 16>": "dense GEMMs",
        "triton_red_fused__fused_rms_norm_backward_add_3": "norms, rotation, residuals",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10>>":
            "adding up gradients",
    }.items():  # fmt: skip
        assert training_step.part_of(kernel, ours) == part, kernel
