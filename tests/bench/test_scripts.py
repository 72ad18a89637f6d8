"""Each script of benchmarks/ once on the CPU, as far as one runs it."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from research import fp8, results

import sonicmoe.layer.run

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = ["--device", "cpu", "--shape", "64,32,16,4,2"]


@pytest.fixture
def script(quick, monkeypatch, tmp_path):
    """Run `python benchmarks/NAME.py FLAGS`: its exit status, and the records that it kept."""

    def run(name: str, *flags: str) -> tuple[int | str | None, list[dict]]:
        where = ["--results", str(tmp_path)] if "cute" not in name else []
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags, *where])
        try:
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        except SystemExit as done:
            return done.code, results.read(tmp_path)
        return 0, results.read(tmp_path)

    return run


def test_layer_beside_a_peer(script, capsys):
    flags = ["--peers", "grouped_mm", "--routing", "uniform", "hot", "--kernels"]
    code, records = script("layer", *TINY, *flags)
    printed = capsys.readouterr().out
    assert code == 0 and "time ÷ uniform" in printed and "| grouped_mm |" in printed
    names = ["sonicmoe", "sonicmoe", "dense", "grouped_mm", "operators"]
    assert [r["candidate"] for r in records] == 2 * names
    first, *_, operators = records[:5]
    assert first["command"].startswith("python benchmarks/layer.py --device cpu")
    assert {c["tensor"] for c in first["checks"]} == {"out", "x", "w1", "w2", "router_w"}
    assert first["kept_mib"] > 0 and first["dense_share"] == 1.0  # every call takes 1 ms
    flops = {o["name"]: o["flops"] for o in operators["operators"]}
    assert flops["up"] == 2 * 128 * 32 * 32 and flops["down"] == 2 * 128 * 32 * 16
    assert all(o["traffic"] > 4 * 128 * 16 for o in operators["operators"] if o["flops"])


def test_layer_gives_no_figure_from_a_wrong_layer(script, capsys, monkeypatch):
    right = sonicmoe.layer.run.finish
    monkeypatch.setattr(sonicmoe.layer.run, "finish", lambda *given: right(*given) * 1.001)
    assert script("layer", *TINY, "--peers") == (1, [])
    assert "wrong out, x, w1, w2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "figure"),
    [("host", "calling_thread_host_fwd_bwd_ms"), ("modes", "main_grad_fwd_bwd_ms")],
)
def test_layer_instead(name, figure, script):
    code, (record,) = script("layer", *TINY, "--instead", name)
    assert code == 0 and record["candidate"] == name and record[figure] > 0


PUBLISHED = """
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
    return (out,)
"""


def test_layer_beside_the_published_package(script, tmp_path):
    """A stand-in under the published names, in a process of its own."""
    package = tmp_path / "theirs" / "sonicmoe"
    package.mkdir(parents=True)
    (package.parent / "sonic_moe-0.1.2.post1.dist-info").mkdir()
    (package / "__init__.py").write_text("print('whatever a package may print')\n")
    (package / "enums.py").write_text("ActivationType = {'SWIGLU': None}\n")
    (package / "functional.py").write_text(PUBLISHED)
    flags = ["--peers", "--sonicmoe-path", str(package.parent)]
    code, records = script("layer", *TINY, *flags)
    assert code == 0
    found = {r["candidate"]: r.get("version") for r in records}
    assert found == {"sonicmoe": None, "dense": None, "published": "0.1.2.post1"}
    assert "--sonicmoe-path FOLDER" in records[0]["command"]


def test_the_published_script_with_its_flags(script, capsys):
    flags = "--thiek 128,64,32,8,2 --topk_over_softmax --norm_topk_probs --concat_layout --add_bias"
    more = "--activation geglu --dtype float32 --skip_test"
    assert script("moe-cute", *flags.split(), *more.split())[0] == 0
    printed = capsys.readouterr().out
    assert "geglu with bias, topk_over_softmax_normalized" in printed and "dense" in printed


def test_fp8(script, capsys, monkeypatch):
    """What fails is named, and the others are measured."""

    def broken(inputs):
        raise MemoryError("too large\nand more")

    monkeypatch.setitem(fp8.CANDIDATES, "torchao_rowwise", broken)
    names = ["sonicmoe", "sonicmoe_fp8", "dense", "torchao_rowwise"]
    flags = ["--device", "cpu", "--shape", "128,64,32,4,2", "--rounds", "1"]
    code, records = script("fp8", *flags, "--candidates", *names)
    assert code == 1 and [r["candidate"] for r in records] == names
    assert [r.get("ms") for r in records] == [1.0, 1.0, 1.0, None]
    assert 0 < records[0]["error"] < 0.01 < records[1]["error"] < 0.08
    assert "torchao, row-wise: `MemoryError: too large`" in capsys.readouterr().out


def test_frameworks(script, capsys):
    pytest.importorskip("peft")
    flags = ["--device", "cpu", "--tiny", "--steps", "4", "--part", "model", "lora", "join"]
    code, records = script("frameworks", *flags)
    assert code == 0, capsys.readouterr().err
    candidates = [r["candidate"] for r in records if r["part"] == "lora"]
    assert candidates == [
        "lora_experts", "W + scale·B·A, experts", "PEFT, use_lora_experts", "PEFT, grouped_mm"
    ]  # fmt: skip
    assert all(r["fwd_bwd_ms"] > 0 for r in records if r["part"] == "model")


def test_packed_peers(monkeypatch, tmp_path):
    pytest.importorskip("peft")
    import packed_peers
    from research.packed_layer import LAYERS, Layer

    for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setitem(LAYERS, "tiny", Layer((128, 64, 4, 2)))
    monkeypatch.setattr(packed_peers, "_milliseconds", lambda run: 2.0)
    monkeypatch.setattr(packed_peers, "compile_in_parallel", lambda *args: None)
    arguments = "--device cpu --layers tiny --formats mxfp4 --tokens 24 --rounds 1"
    packed_peers.main([*arguments.split(), "--results", str(tmp_path)])
    (record,) = results.read(tmp_path)
    assert record["not timed"] == {} and len(record["ms"]) == 6
    assert max(record["errors"]["ours to bf16"].values()) < 0.015


def test_records_come_back_oldest_first_with_todays_names(tmp_path):
    record = {"device": "GPU 9", "subject": "ways", "kept_mib": 1.23456789}
    path = results.write([record | {"date": "2026-01-02T00:00"}], tmp_path, "My label")
    assert path == tmp_path / "gpu-9" / "2026-01-02-my-label.jsonl"
    results.write([record | {"date": "2026-01-01T00:00"}], tmp_path, "layer")
    found = results.read(tmp_path)
    assert [r["date"][:10] for r in found] == ["2026-01-01", "2026-01-02"]
    assert (found[1]["kept_mib"], found[1]["candidate"]) == (1.2346, "modes")


def test_provenance_names_no_folder():
    command = "python benchmarks/layer.py --results /home/me --commit abc --peers-path /home/me"
    kept = results.provenance("cpu", command, "abc")
    assert kept["command"] == "python benchmarks/layer.py --peers-path FOLDER"
    assert {"date", "device", "torch", "triton", "commit", "sonicmoe"} <= set(
        json.loads(json.dumps(kept))
    )
