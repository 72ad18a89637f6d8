"""The command line from end to end on the CPU: the same code as on a GPU, by the clock."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sonicmoe.functional
from sonicmoe.bench import cli, results, run
from sonicmoe.bench.cases import ON_CPU, Case
from sonicmoe.bench.values import TRAINED
from sonicmoe.cli import main
from sonicmoe.layer.memory import MemoryPolicy
from sonicmoe.shapes import Problem
from sonicmoe.tools import cost
from sonicmoe.train import hardware

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--shape", "64,32,16,4,2"]


def test_bench_keeps_what_it_prints(quick, tmp_path, capsys):
    arguments = ["bench", *TINY, "--routing", "uniform", "hot", "--kernels", "--host"]
    assert main([*arguments, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for word in (
        "sonicmoe",
        "dense",
        "dz",
        "host_fwd_ms",
        "calling_thread_host_fwd_bwd_ms",
        "module_host_fwd_bwd_ms",
        "dense_host_fwd_bwd_ms",
        "time ÷ uniform",
    ):
        assert word in printed
    (path,) = tmp_path.glob("*/*-layer.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    candidates = ["sonicmoe", "sonicmoe", "dense", "operators"]
    assert [r["candidate"] for r in records] == [*candidates, *candidates, "host"]
    first = records[0]
    assert first["router"] == "in" and records[1]["router"] == "out"
    assert first["command"].startswith("sonicmoe bench --device cpu --shape 64,32,16,4,2")
    assert {c["tensor"] for c in first["checks"]} == {"out", "x", "w1", "w2", "router_w"}
    assert first["kept_mib"] > 0 and first["dense_share"] == 1.0  # every call takes 1 ms
    operators = {o["name"]: o for o in records[3]["operators"]}
    assert operators["up"]["flops"] == 2 * 128 * 32 * 32 and operators["combine"]["flops"] == 0
    assert operators["combine"]["traffic"] == 4 * (128 * 32 + 128 + 128 + 64 * 32)


def test_verify_with_values_of_trained_models(capsys, monkeypatch):
    """`trained` stands for all; a failure names the distribution."""
    tried, verify_case = [], run.verify_case

    def watched(case, routing, options, values):
        tried.append(values)
        return verify_case(case, routing, options, values)

    monkeypatch.setattr(run, "verify_case", watched)
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


def test_the_host_alone(quick, tmp_path, capsys, monkeypatch):
    kept = ["--device", "cpu", "--results", str(tmp_path)]
    assert main(["bench", "--host", *kept]) == 0
    printed = capsys.readouterr().out
    assert printed.index("router_w") < printed.index("host_fwd_bwd_ms")  # checked, then timed
    (path,) = tmp_path.glob("*/*-layer.jsonl")
    (found,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (found["candidate"], found["shape"]) == ("host", "64,128,64,8,2")

    monkeypatch.setattr("sonicmoe.bench.run.passed", lambda checks: False)
    assert main(["bench", "--host", *kept]) == 1
    assert "host_fwd_ms" not in capsys.readouterr().out
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("command", ["bench", "verify"])
def test_no_figure_from_a_wrong_layer(command, quick, tmp_path, capsys, monkeypatch):
    right = sonicmoe.layer.run.finish
    monkeypatch.setattr(sonicmoe.layer.run, "finish", lambda *given: right(*given) * 1.001)
    more = ["--results", str(tmp_path)] if command == "bench" else []
    assert main([command, *TINY, *more]) == 1
    captured = capsys.readouterr()
    assert "wrong out, x, w1, w2" in captured.err and "It is not timed" in captured.err
    assert "TFLOP/s" not in captured.out
    assert not list(tmp_path.rglob("*.jsonl"))


def test_unverified_figures_are_marked_and_not_kept(quick, tmp_path, capsys):
    arguments = ["bench", *TINY, "--no-verify", "--results", str(tmp_path)]
    assert main(arguments) == 0
    assert "NOT VERIFIED" in capsys.readouterr().out
    assert results.read(tmp_path) == []


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


def test_there_is_one_data_sheet_of_a_gpu():
    assert all(cost.find_gpu(name) is gpu for name, gpu in hardware.GPUS.items())


def test_list_names_every_case(capsys):
    assert main(["bench", "--list"]) == 0
    assert "deepseek-v3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--shape", "1,2,3"], "shape: expected five integers"),
        (["--case", "nine"], "case: expected one of"),
        (["--case", "olmoe", "--bias"], "--bias: expected --shape with it"),
        (["--shape", "64,32,16,4,2", "--routing", "cold"], "routing: expected one of"),
        (["--no-times"], "--no-times: expected --host, --cold or --modes with it"),
        (["--no-times", "--cold", "--routing", "hot"], "--no-times: expected uniform routing"),
        (["--no-times", "--cold", "--kernels"], "--no-times: expected no timing flag"),
    ],
)
def test_bad_arguments_are_explained(arguments, complaint, capsys):
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("command", ["bench", "verify"])
def test_without_a_gpu(command, quick, tmp_path, monkeypatch, capsys):
    """A small layer on the CPU, nothing in the user's folder; a GPU that was named is missed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "ON_CPU", Case.of_shape("64,32,16,4,2"))
    assert main([command]) == 0
    said = capsys.readouterr()
    note = "No GPU can be used: plain PyTorch on the CPU, one small layer (64,32,16,4,2).\n"
    assert said.err.startswith(note) and "64,32,16,4,2, swiglu" in said.out
    assert list(tmp_path.iterdir()) == []
    assert main([command, "--shape", "32,32,16,4,2"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("No GPU can be used: plain PyTorch on the CPU.\n")
    assert "\n32,32,16,4,2, swiglu" in said.out
    assert main([command, "--device", "cuda"]) == 2
    assert "Without a GPU: --device cpu" in capsys.readouterr().err


def test_the_small_layer_takes_seconds_on_a_cpu():
    """Its FLOPs with those of the fp64 reference and the fp32 one, at 1 GFLOP/s."""
    p = ON_CPU.problem
    assert 3 * (cost.forward_flops(p) + cost.backward_flops(p)) < 5e9


def script(monkeypatch, *flags: str) -> int | str | None:
    """Run the script as `python benchmarks/moe-cute.py` does and return what it exits with."""
    monkeypatch.setattr(sys, "argv", ["moe-cute.py", *flags])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(ROOT / "benchmarks" / "moe-cute.py"), run_name="__main__")
    return done.value.code


def test_the_published_script_with_its_flags(quick, monkeypatch, capsys):
    flags = "--thiek 128,64,32,8,2 --topk_over_softmax --norm_topk_probs --concat_layout --add_bias"
    more = "--activation geglu --dtype float32 --skip_test"
    assert script(monkeypatch, *flags.split(), *more.split()) == 0
    printed = capsys.readouterr().out
    assert "geglu with bias, topk_over_softmax_normalized" in printed and "dense" in printed


def test_the_published_script_checks_first(quick, monkeypatch, capsys):
    assert script(monkeypatch, "--thiek", "128,64,32,8,2") == 0
    assert "NOT VERIFIED" not in capsys.readouterr().out


def test_the_published_script_explains_bad_flags(monkeypatch, capsys):
    assert "T,H,I,E,K" in script(monkeypatch, "--thiek", "1,2")
    assert script(monkeypatch, "--norm_topk_probs") == 2
    assert "--topk_over_softmax" in capsys.readouterr().err


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "sonicmoe", "--help"], capture_output=True, text=True
    )
    for command in ("bench", "verify", "tune", "cost", "doctor", "train", "plan"):
        assert f"\n    {command} " in done.stdout


def test_a_cold_start_alone(tmp_path, capsys):
    assert main(["bench", *TINY, "--cold", "--no-times", "--results", str(tmp_path)]) == 0
    assert "cold start, 64,32,16,4,2" in capsys.readouterr().out
    (record,) = results.read(tmp_path)
    assert record["candidate"] == "cold"
    assert record["cold_first_call_s"] > 0 and record["new_tokens_steady_ms"] > 0


def test_modes(quick, tmp_path, capsys, monkeypatch):
    kept = ["--results", str(tmp_path), "--dtype", "bfloat16"]
    assert main(["bench", *TINY, "--modes", "--no-times", *kept]) == 0
    assert "modes, 64,32,16,4,2" in capsys.readouterr().out
    (record,) = results.read(tmp_path)
    assert record["candidate"] == "modes"
    for mode in ("plain", "checkpointed", "frozen", "main_grad", "autocast"):
        assert record[f"{mode}_fwd_bwd_ms"] > 0


def test_a_mode_that_is_wrong_is_not_timed(monkeypatch):
    from sonicmoe.bench.modes import measure_modes
    from sonicmoe.layer import checkpoint

    monkeypatch.setattr(checkpoint.Output, "backward", lambda ctx, dout: (1.1 * dout, None))
    with pytest.raises(RuntimeError, match="checkpointed: the gradient of x differs"):
        measure_modes(Case.of_shape("64,32,16,4,2"), "cpu", torch.float32)
