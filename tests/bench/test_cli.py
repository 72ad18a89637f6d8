"""The command line from end to end on the CPU: the same code as on a GPU, by the clock."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sonicmoe.functional
from sonicmoe.bench import peers, results
from sonicmoe.bench import readme as section
from sonicmoe.cli import main

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--shape", "64,32,16,4,2"]


@pytest.fixture
def quick(monkeypatch):
    """One call instead of many: these tests look at what is printed, not at the clock."""
    from sonicmoe.bench import host, timing

    monkeypatch.setattr(timing, "_clocked", lambda call, device, budget_s, least: [1.0])

    def once(call, device, calls, queued):
        call()
        return 1.0

    monkeypatch.setattr(host, "host_ms", once)


def test_bench_keeps_what_it_prints(quick, tmp_path, capsys):
    arguments = ["bench", *TINY, "--routing", "uniform", "hot", "--kernels", "--host"]
    assert main([*arguments, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for word in (
        "sonicmoe",
        "grouped_mm",
        "dense",
        "down_backward",
        "host_fwd_ms",
        "calling_thread_host_fwd_bwd_ms",
        "module_host_fwd_bwd_ms",
        "dense_host_fwd_bwd_ms",
        "time ÷ uniform",
    ):
        assert word in printed
    (path,) = tmp_path.glob("*/*-layer.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    subjects = ["sonicmoe", "sonicmoe", "grouped_mm", "dense", "operators"]
    assert [r["subject"] for r in records] == [*subjects, *subjects, "host"]
    first = records[0]
    assert first["router"] == "in" and records[1]["router"] == "out"
    assert first["command"].startswith("sonicmoe bench --device cpu --shape 64,32,16,4,2")
    assert {c["tensor"] for c in first["checks"]} == {"out", "x", "w1", "w2", "router_w"}
    assert first["kept_mib"] > 0 and first["dense_share"] == 1.0  # every call takes 1 ms
    operators = {o["stage"]: o for o in records[4]["operators"]}
    assert operators["up"]["flops"] == 2 * 128 * 32 * 32 and operators["aggregate"]["flops"] == 0
    assert operators["aggregate"]["traffic"] == 4 * (128 * 32 + 128 + 128 + 64 * 32)


def test_the_host_alone(quick, tmp_path, capsys, monkeypatch):
    kept = ["--device", "cpu", "--results", str(tmp_path)]
    assert main(["bench", "--host", *kept]) == 0
    printed = capsys.readouterr().out
    assert printed.index("router_w") < printed.index("host_fwd_bwd_ms")  # checked, then timed
    (path,) = tmp_path.glob("*/*-layer.jsonl")
    (found,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (found["subject"], found["shape"]) == ("host", "64,128,64,8,2")

    monkeypatch.setattr("sonicmoe.bench.run.passed", lambda checks: False)
    assert main(["bench", "--host", *kept]) == 1
    assert "host_fwd_ms" not in capsys.readouterr().out
    assert len(path.read_text().splitlines()) == 1


def test_report_from_kept_results(quick, tmp_path):
    kept = ["--results", str(tmp_path / "kept")]
    routings = ["--routing", "uniform", "zipf", "hot"]
    assert main(["bench", *TINY, *routings, "--peers", "dense", "--kernels", "--host", *kept]) == 0
    readme = tmp_path / "README.md"
    readme.write_text(f"{section.BEGIN}\n{section.END}\n")
    assert main(["bench", "--report", str(readme), *kept]) == 0
    text = readme.read_text()
    assert text.count("| 64,32,16,4,2 | ") == 2 and "1.00×" in text and "The host at" in text


@pytest.mark.parametrize("command", ["bench", "verify"])
def test_no_figure_from_a_wrong_layer(command, quick, tmp_path, capsys, monkeypatch):
    right = sonicmoe.functional._layer
    monkeypatch.setattr(sonicmoe.functional, "_layer", lambda *given: right(*given) * 1.001)
    more = ["--peers", "--results", str(tmp_path)] if command == "bench" else []
    assert main([command, *TINY, *more]) == 1
    captured = capsys.readouterr()
    assert "wrong out, x, w1, w2" in captured.err and "No figure is given" in captured.err
    assert "TFLOP/s" not in captured.out
    assert not list(tmp_path.rglob("*.jsonl"))


def test_unverified_figures_are_marked_and_not_kept(quick, tmp_path, capsys):
    arguments = ["bench", *TINY, "--peers", "--no-verify", "--results", str(tmp_path)]
    assert main(arguments) == 0
    assert "NOT VERIFIED" in capsys.readouterr().out
    assert results.read(tmp_path) == []


def test_verify_prints_every_tensor(capsys):
    assert main(["verify", *TINY, "--activation", "geglu", "--bias"]) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n{name} ") == 2 for name in ("out", "x", "w1", "w2", "b1", "b2"))
    assert "FAILS" not in printed


def test_cost_prints_the_model(capsys):
    assert main(["cost", "--case", "7b-fine", "--gpu", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "0.46 TFLOP forward" in printed and "205285908" in printed and "H200" in printed


def test_cost_knows_the_tiles_of_each_dtype(capsys):
    for dtype, tiles in (("bfloat16", 1 + 4), ("float32", 4 + 4)):  # 128 rows, 4 experts
        assert main(["cost", "--shape", "64,32,16,4,2", "--dtype", dtype]) == 0
        (line,) = [s for s in capsys.readouterr().out.splitlines() if s.startswith("tiles ")]
        assert line.split()[1] == str(16 * (1 + tiles))


def test_list_names_every_case(capsys):
    assert main(["bench", "--list"]) == 0
    assert "deepseek-v3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--shape", "1,2,3"], "shape: expected five integers"),
        (["--case", "nine"], "case: expected one of"),
        (["--case", "olmoe", "--bias"], "--bias: expected --shape beside it"),
        (["--shape", "64,32,16,4,2", "--routing", "cold"], "routing: expected one of"),
        (["--shape", "64,32,16,4,2", "--peers", "someone"], "--peers: expected names of"),
        (["--no-times"], "--no-times: expected --host, --cold or --ways beside it"),
        (["--no-times", "--cold", "--routing", "hot"], "--no-times: expected uniform routing"),
        (["--no-times", "--cold", "--peers", "dense"], "--no-times: expected no flag that"),
    ],
)
def test_bad_arguments_are_explained(arguments, complaint, capsys):
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu_is_explained(capsys):
    assert main(["bench", "--shape", "64,32,16,4,2"]) == 2
    assert "Without a GPU: --device cpu" in capsys.readouterr().err


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
        [sys.executable, "-m", "sonicmoe", "--help"], capture_output=True, text=True, timeout=120
    )
    for command in ("bench", "verify", "tune", "cost", "doctor", "train", "plan"):
        assert f"\n    {command} " in done.stdout


def test_a_cold_start_alone(tmp_path, capsys):
    assert main(["bench", *TINY, "--cold", "--no-times", "--results", str(tmp_path)]) == 0
    assert "cold start, 64,32,16,4,2" in capsys.readouterr().out
    assert [record["subject"] for record in results.read(tmp_path)] == ["cold"]


def test_ways_to_run_a_layer(quick, tmp_path, capsys, monkeypatch):
    kept = ["--results", str(tmp_path), "--dtype", "bfloat16"]
    assert main(["bench", *TINY, "--ways", "--no-times", *kept]) == 0
    assert "ways to run it, 64,32,16,4,2" in capsys.readouterr().out
    (record,) = results.read(tmp_path)
    assert record["subject"] == "ways"
    for way in ("plain", "checkpointed", "frozen", "main_grad", "autocast"):
        assert record[f"{way}_fwd_bwd_ms"] > 0


def test_a_way_that_is_wrong_is_not_timed(monkeypatch):
    from sonicmoe import autograd
    from sonicmoe.bench.cases import Case
    from sonicmoe.bench.ways import measure_ways

    monkeypatch.setattr(autograd.Rest, "backward", lambda ctx, dout: (1.1 * dout, None))
    with pytest.raises(RuntimeError, match="checkpointed: the gradient of x is off"):
        measure_ways(Case.of_shape("64,32,16,4,2"), "cpu", torch.float32)


def test_cold_start_in_a_process_of_its_own():
    from sonicmoe.bench.cases import Case
    from sonicmoe.bench.cold import measure_cold

    found = measure_cold(Case.of_shape("64,32,16,4,2"), "cpu", "float32")
    assert found["cold_first_call_s"] > 0 and found["new_tokens_steady_ms"] > 0


STAND_IN = """
import torch
import torch.nn.functional as F

def moe_TC_softmax_topk_layer(x, router_w, w1, b1, w2, b2, K, stream, activation, inference):
    values, ids = F.linear(x, router_w).topk(K, dim=-1)
    scores, out = values.softmax(-1), torch.zeros_like(x)
    for e in range(w1.shape[-1]):
        token, k = (ids == e).nonzero(as_tuple=True)
        z = x[token] @ w1[:, :, e].T
        y = (F.silu(z[:, ::2]) * z[:, 1::2]) @ w2[:, :, e].T
        out = out.index_add(0, token, scores[token, k, None] * y)
    return (out * SCALE,)
"""


@pytest.mark.parametrize("scale", [1.0, 1.1])
def test_the_published_package_answers_from_its_own_process(tmp_path, scale):
    """A stand-in under the published names: what the folder holds is measured, if it is right."""
    from sonicmoe.bench.cases import Case
    from sonicmoe.bench.published import Failed, Published

    folder = tmp_path / "sonicmoe"
    folder.mkdir()
    (folder / "__init__.py").write_text("print('whatever a package may print')\n")
    (folder / "enums.py").write_text("ActivationType = {'SWIGLU': None}\n")
    (folder / "functional.py").write_text(STAND_IN.replace("SCALE", str(scale)))
    case = Case.of_shape("64,32,16,4,2")
    with Published(str(tmp_path), case, "uniform", "float32", "cpu") as package:
        if scale == 1.0:
            found = package.needs()
            assert found["first_call_s"] > 0 and found["kept_mib"] > 0 and len(found["checks"]) == 5
            assert package.forward() > 0 and package.both() > 0 and package.forward() > 0
        else:
            with pytest.raises(Failed, match="differs from fp64 in out, x"):
                package.needs()


def test_a_package_that_cannot_be_imported_is_reported(tmp_path):
    from sonicmoe.bench.cases import Case
    from sonicmoe.bench.published import Failed, Published

    (tmp_path / "sonicmoe.py").write_text("raise RuntimeError('not today')\n")
    case = Case.of_shape("64,32,16,4,2")
    with (
        Published(str(tmp_path), case, "uniform", "float32", "cpu") as package,
        pytest.raises(Failed, match="RuntimeError: not today"),
    ):
        package.needs()


def test_a_package_that_never_answers_is_given_up(tmp_path, monkeypatch):
    from sonicmoe.bench import published
    from sonicmoe.bench.cases import Case

    (tmp_path / "sonicmoe.py").write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr(published, "TIMEOUT_S", 0.5)
    case = Case.of_shape("64,32,16,4,2")
    with (
        published.Published(str(tmp_path), case, "uniform", "float32", "cpu") as package,
        pytest.raises(published.Failed, match=r"no answer within 0\.5 s"),
    ):
        package.needs()


def test_a_peer_that_breaks_between_turns_does_not_stop_us(quick, tmp_path, capsys, monkeypatch):
    right, calls = peers.dense, []

    def breaks_later(*given):
        forward, both = right(*given)

        def forward_once():
            calls.append(1)
            if len(calls) > 1:
                raise MemoryError("too hot")
            forward()

        return forward_once, both

    monkeypatch.setattr(peers, "dense", breaks_later)
    assert main(["bench", *TINY, "--peers", "dense", "--results", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "dense gives no figure: MemoryError: too hot" in captured.err and len(calls) == 2
    assert [r["subject"] for r in results.read(tmp_path)] == ["sonicmoe", "sonicmoe"]
    assert "\ndense " not in captured.out


def test_a_peer_that_breaks_does_not_stop_us(quick, tmp_path, capsys, monkeypatch):
    def broken(inputs):
        raise MemoryError("too large")

    monkeypatch.setitem(peers.PEERS, "grouped_mm", broken)
    assert main(["bench", *TINY, "--peers", "grouped_mm", "--results", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "grouped_mm gives no figure: MemoryError: too large" in captured.err
    assert "grouped_mm" not in captured.out and "sonicmoe" in captured.out
