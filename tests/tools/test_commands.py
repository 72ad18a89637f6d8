"""`sonicmoe verify` and `sonicmoe cost`, as on a GPU."""

import re
import subprocess
import sys

import pytest
import torch

import sonicmoe.functional
from sonicmoe.cli import main
from sonicmoe.layer.memory import MemoryPolicy
from sonicmoe.shapes import Problem
from sonicmoe.tools import commands, cost, verify_run
from sonicmoe.tools.cases import ON_CPU, Case
from sonicmoe.tools.values import TRAINED

TINY = ["--device", "cpu", "--shape", "64,32,16,4,2"]


def test_verify_with_values_of_trained_models(capsys, monkeypatch):
    """`trained` stands for all; a failure names the distribution."""
    tried, verify_case = [], verify_run.verify_case

    def watched(case, routing, options, values):
        tried.append(values)
        return verify_case(case, routing, options, values)

    monkeypatch.setattr(verify_run, "verify_case", watched)
    assert main(["verify", *TINY, "--values", "rows_30", "trained", "gaussian"]) == 0
    assert tried == ["rows_30", *(name for name in TRAINED if name != "rows_30"), "gaussian"]
    printed = capsys.readouterr().out
    assert all(f"router out, values {name}\n" in printed for name in TRAINED)
    assert "router in\n" in printed and "router in, values" not in printed

    right = sonicmoe.layer.run.finish
    monkeypatch.setattr(sonicmoe.layer.run, "finish", lambda *given: right(*given) * 1.001)
    assert main(["verify", *TINY, "--values", "channels_30"]) == 1
    assert "uniform routing, values channels_30: sonicmoe, router out: wrong out" in (
        capsys.readouterr().err
    )
    assert main(["verify", *TINY, "--values", "normal"]) == 2
    assert "--values: expected one of gaussian, rows_10" in capsys.readouterr().err


def test_a_wrong_layer_is_named(capsys, monkeypatch):
    right = sonicmoe.layer.run.finish
    monkeypatch.setattr(sonicmoe.layer.run, "finish", lambda *given: right(*given) * 1.001)
    assert main(["verify", *TINY]) == 1
    assert "wrong out, x, w1, w2" in capsys.readouterr().err


def test_verify_prints_every_tensor(capsys):
    assert main(["verify", *TINY, "--activation", "geglu", "--bias"]) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n| {name} ") == 2 for name in ("out", "x", "w1", "w2", "b1", "b2"))
    assert "FAILS" not in printed


def test_cost_prints_the_model(capsys):
    assert main(["cost", "--case", "7b-fine", "--gpu", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "0.46 TFLOP forward" in printed and "205285908" in printed and "H200" in printed


def test_cost_of_a_memory_policy(capsys):
    arguments = ["cost", "--shape", "32768,4096,256,256,16"]
    for more, kept, words in (
        (["--memory", "e4m3"], 274, "z_scale"),
        (["--memory", "recompute", "--slices", "4"], 10, "up again"),
    ):
        assert main([*arguments, *more]) == 0
        printed = capsys.readouterr().out
        found = re.search(r"kept for backward\W+\d+\W+(\d+)", printed)
        assert found and int(found[1]) == kept and words in printed


@pytest.mark.parametrize("precision", ["fp8", "fp8_bf16_dw"])
def test_cost_of_fp8(precision, capsys):
    p = Problem(32768, 2048, 1024, 64, 8)
    for memory, gemm in (("keep", "up"), ("e4m3", "up"), ("recompute", "up again")):
        arguments = ["--memory", memory, "--slices", "2", "--gpu", "h200", "--precision", precision]
        assert main(["cost", "--case", "olmoe", *arguments]) == 0
        printed = capsys.readouterr().out
        policy = MemoryPolicy(memory, 2)
        kept = sum(cost.kept_bytes(p, memory=policy, precision=precision).values())
        peak = cost.peak_bytes(p, memory=policy, precision=precision)
        assert all(f" {n} |" in printed for n in (kept, peak.forward, peak.backward))
        assert re.search(
            rf"\| {gemm} .* {2e3 * p.R * p.H * p.N / 1979e12:.4f} \| *compute", printed
        )
        assert f"{precision} without the quantization" in printed


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--gpu", "a100"], "precision: expected None on a GPU other than Hopper"),
        (["--gpu", "b200"], "precision: expected None on a GPU other than Hopper"),
        (["--dtype", "float32"], "--dtype: expected bfloat16 with --precision fp8, got float32"),
        (["--shape", "64,24,16,4,2"], "64,24,16,4,2: hidden_size: expected a multiple of 16"),
        (["--shape", "64,16,24,4,2"], "intermediate_size: expected a multiple of 16"),
    ],
)
def test_cost_says_what_fp8_needs(arguments, complaint, capsys):
    assert main(["cost", "--case", "olmoe", "--precision", "fp8", *arguments]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err and not captured.out


def test_cost_of_fp8_with_biases(capsys):
    assert main(["cost", "--suite", "models", "--precision", "fp8"]) == 0
    assert "gpt-oss-20b" in capsys.readouterr().out


def test_cost_refuses_what_the_layer_refuses(capsys):
    for arguments, complaint in (
        (["--shape", "64,16,16,40000,2"], "expected at most 32767 experts, got 40000"),
        (["--shape", "64,16,16,32767,2", "--memory", "e4m3", "--gpu", "a100"], "without e4m3"),
    ):
        assert main(["cost", *arguments]) == 2
        assert complaint in capsys.readouterr().err
    assert main(["cost", "--shape", "64,24,24,32767,2", "--bias", "--gpu", "b200"]) == 0
    assert main(["cost", "--case", "olmoe", "--memory", "e4m3", "--gpu", "b200"]) == 0


def test_cost_of_a_card_by_its_numbers(capsys):
    """The same as of a GPU in the table with these numbers; FP8 is not known of it."""
    tables = []
    for gpu in ("h100", "989,3350"):
        assert main(["cost", "--case", "olmoe", "--gpu", gpu]) == 0
        *table, rates = capsys.readouterr().out.splitlines()
        tables.append(table)
    assert tables[0] == tables[1] and rates == "on one card (989 TFLOP/s, 3350 GB/s, as given)"
    for arguments, complaint in (
        (["--gpu", "rtx4090"], "Any other card: its dense TFLOP/s and GB/s"),
        (["--gpu", "165,1TB"], "gpu: expected TFLOP/s,GB/s, got '165,1TB'"),
        (["--gpu", "165,0"], "gpu: expected two numbers above 0"),
        (["--gpu", "165,1008", "--precision", "fp8"], "Omit --precision"),
        (["--gpu", "165,1008", "--memory", "e4m3"], "Omit --precision and --memory e4m3"),
    ):
        assert main(["cost", "--case", "olmoe", *arguments]) == 2
        assert complaint in capsys.readouterr().err


def test_cost_knows_the_tiles_of_each_dtype(capsys):
    for dtype, tiles in (("bfloat16", 1 + 4), ("float32", 4 + 4)):  # 128 rows, 4 experts
        assert main(["cost", "--shape", "64,32,16,4,2", "--dtype", dtype]) == 0
        (line,) = [s for s in capsys.readouterr().out.splitlines() if s.startswith("| tiles ")]
        assert line.split()[3] == str(16 * (1 + tiles))


def test_benchmarks_have_moved(capsys):
    assert main(["bench", "--case", "olmoe", "--host"]) == 2
    assert "In a clone of the repository run: python benchmarks/layer.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--shape", "1,2,3"], "shape: expected five integers"),
        (["--case", "nine"], "case: expected one of"),
        (["--case", "olmoe", "--bias"], "--bias: expected --shape with it"),
        (["--shape", "64,32,16,4,2", "--routing", "cold"], "routing: expected one of"),
    ],
)
def test_bad_arguments_are_explained(arguments, complaint, capsys):
    assert main(["verify", "--device", "cpu", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu(monkeypatch, capsys):
    """A small layer on the CPU; a GPU that was named is missed."""
    monkeypatch.setattr(commands, "ON_CPU", Case.of_shape("64,32,16,4,2"))
    assert main(["verify"]) == 0
    said = capsys.readouterr()
    note = "No GPU can be used: plain PyTorch on the CPU, one small layer (64,32,16,4,2).\n"
    assert said.err.startswith(note) and "64,32,16,4,2, swiglu" in said.out
    assert main(["verify", "--shape", "32,32,16,4,2"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("No GPU can be used: plain PyTorch on the CPU.\n")
    assert "\n32,32,16,4,2, swiglu" in said.out
    assert main(["verify", "--device", "cuda"]) == 2
    assert "Without a GPU: --device cpu" in capsys.readouterr().err


def test_the_small_layer_takes_seconds_on_a_cpu():
    """Its FLOPs with those of the fp64 reference and the fp32 one, at 1 GFLOP/s."""
    p = ON_CPU.problem
    assert 3 * (cost.forward_flops(p) + cost.backward_flops(p)) < 5e9


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "sonicmoe", "--help"], capture_output=True, text=True
    )
    for command in ("verify", "tune", "cost", "doctor"):
        assert f"\n    {command} " in done.stdout
