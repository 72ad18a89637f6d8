"""benchmarks/training_step.py whole, at toy size, and its table and picture."""

import json
import math
from pathlib import Path

import pytest
import torch
import training_step as script
from research import training_step, training_step_report

from sonicmoe.bench.results import read
from sonicmoe.train.presets import preset

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


def test_curves_repeat_are_compared_and_drawn(tmp_path, tokens, capsys):
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    common = [*COMMON, "--curve", "60", "--tokens", str(tokens), "--results", str(results)]
    common += ["--set", "learning_rate=3e-2"]
    for precision in ("fp32", "fp32", "bf16"):
        assert script.main([*common, "--precision", precision, "--backend", "torch"]) == 0
    one, again, other = read(results)
    assert one["losses"] == again["losses"] != other["losses"]
    assert len(one["losses"]) == 60 and one["losses"][-1] < 1 < one["losses"][0]
    assert "--tokens FILE" in one["command"]
    capsys.readouterr()
    assert script.main(["--redraw", "--results", str(results)]) == 0
    told = capsys.readouterr().out
    assert told.count("seed 0") == 2  # of the first two only the newer one
    (folder,) = results.glob("*/training-step")
    assert {path.name for path in folder.iterdir()} == {"step.md", "curve.png"}
    assert (folder / "step.md").read_text() in f"{told}\n"


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    path = tmp_path / "tokens"
    path.write_bytes((50303).to_bytes(4, "little") * 500)
    config = preset("7B")
    assert training_step.read_tokens(path, config).unique().tolist() == [50303]
    with pytest.raises(ValueError, match=r"--tokens.*vocab_size = 1024.*50303"):
        training_step.read_tokens(path, preset("demo"))


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


def test_a_step_of_fewer_layers_is_extrapolated():
    config = preset("7B").override({"num_layers": 4, "batch": 96})
    found = {
        "layers": 4, "parameters": 0.83e9, "micro_batches": 16, "tokens_per_micro_batch": 24576,
        "micro_batch_ms": 55.9, "update_ms": 3.6, "parts_ms": {"head and loss": 18.5},
    }  # fmt: skip
    more = training_step.extrapolated(found, config, 44)
    assert more["micro_batch_ms"] == pytest.approx(18.5 + 44 * 9.35)
    assert more["update_ms"] == pytest.approx(3.6 * 7.15 / 0.83, rel=0.01)
    assert more["tokens_per_second"] == pytest.approx(16 * 24576 / (16 * 0.4299 + 0.031), rel=0.01)


def test_steps_are_tabulated_and_held_against_the_plan(tmp_path):
    parts = dict.fromkeys(training_step.PARTS, 20.0) | {"MoE kernels": 140.0, "optimizer": 30.0}
    parts |= {"attention": 103.0, "dense GEMMs": 100.0}
    record = {
        "kind": "training step", "date": "2026-11-18T20:00:00+00:00", "device": "NVIDIA H200",
        "preset": "7B", "precision": "bf16", "backend": "auto", "deterministic": False,
        "compile": True, "recompute": False, "memory": "keep", "layers": 44, "steps": 2,
        "tokens_per_micro_batch": 24576, "micro_batches": 16, "micro_batch_ms": 440.0,
        "update_ms": 28.0, "step_ms": 7068.0, "tokens_per_second": 55632.0, "peak_gib": 110.0,
        "busy_ms": 430.0, "parts_ms": parts, "parameters": 7.15e9,
    }  # fmt: skip
    fewer = {"layers": 8, "micro_batch_ms": 120.0, "step_ms": 1930.0, "tokens_per_second": 2e5}
    more = {"layers": 44, "micro_batch_ms": 570.0, "update_ms": 28.0, "tokens_per_second": 43e3}
    peer = record | fewer | {"backend": "scattermoe", "extrapolated": more}
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    lines = "".join(json.dumps(r) + "\n" for r in (record | {"step_ms": 9e3}, record, peer))
    (folder / "2026-11-18-training-step.jsonl").write_text(lines)
    text = training_step_report.report(tmp_path)
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
    assert [
        "7B, this package, bf16",
        "44",
        "16",
        "440.0",
        "28.0",
        "55.6k",
        "4.81B",
        "110.0",
    ] in rows
    assert "43.0k (extrapolated)" in text and "3.72B" in text
    (planned,) = [row for row in rows if row[:2] == ["7B, this package, bf16, 44 layers", "7068.0"]]
    assert 0.9 < float(planned[3]) < 1.1
    assert any(row[0].endswith("attention_128") and row[1] == "0.401" for row in rows if row)


def test_out_of_memory_is_a_record(tmp_path, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(training_step, "measure", full)
    assert script.main([*COMMON, "--results", str(tmp_path)]) == 1
    (record,) = read(tmp_path)
    assert record["failed"] == "out of memory: CUDA out of memory."
    assert "out of memory" in training_step_report.report(tmp_path)
