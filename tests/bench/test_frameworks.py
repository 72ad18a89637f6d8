"""benchmarks/frameworks.py on a CPU: every part, and no figure for what is wrong."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import sonicmoe.functional
from sonicmoe.bench import timing
from sonicmoe.integrations import transformers as adapter

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "frameworks.py"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Run it as `python benchmarks/frameworks.py` does: its exit code, and the records kept."""
    monkeypatch.setattr(timing, "_clocked", lambda call, device, budget_s, least: [1.0])

    def run(*flags: str) -> tuple[int | str | None, list[dict]]:
        common = ["--device", "cpu", "--tiny", "--steps", "4", "--results", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *common, *flags])
        with pytest.raises(SystemExit) as done:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        lines = [line for path in tmp_path.rglob("*.jsonl") for line in path.open()]
        return done.value.code, [json.loads(line) for line in lines]

    return run


def test_every_part(script, capsys):
    code, records = script()
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found: dict[str, list] = {}
    for record in records:
        found.setdefault(record["part"], []).append(record)
    three = ["sonicmoe_experts", "eager", "grouped_mm"]
    assert [(r["case"], r["candidate"]) for r in found["train"]] == [
        (model, name) for model in ("Qwen3Moe", "GptOss") for name in three
    ]
    for record in found["train"]:
        assert len(record["losses"]) == 4 and all(map(math.isfinite, record["losses"]))
        assert record["step_ms"] > 0 and record["off_eager"] < 1e-3
    ours = ["sonicmoe_experts", "sonicmoe_experts, watched"]
    assert [r["candidate"] for r in found["model"]] == [*ours, "grouped_mm", *ours]
    assert all(r["fwd_bwd_ms"] > 0 for r in found["model"])
    assert [(r["candidate"], r["router"]) for r in found["layer"]] == [
        (name, router) for name in ("sonicmoe_experts", "grouped_mm") for router in ("out", "in")
    ]
    assert {c["tensor"] for c in found["layer"][1]["checks"]} == {
        "out",
        "x",
        "w1",
        "w2",
        "router_w",
    }
    assert [r["candidate"] for r in found["lora"]] == [
        "lora_experts", "W + scale·B·A, experts", "PEFT, use_lora_experts", "PEFT, grouped_mm"
    ]  # fmt: skip
    one, two = found["join"]
    assert two["kept_mib"] - one["kept_mib"] == pytest.approx(2 * 4 * 8 * 16 * 32 / 2**20, rel=1e-3)
    assert all(word in captured.out for word in ("ms a step", "× grouped_mm", "two, joined"))
    assert all(r["command"].startswith("python benchmarks/frameworks.py --d") for r in records)


def test_no_figure_from_a_wrong_layer(script, capsys, monkeypatch):
    right = sonicmoe.layer.run.finish
    monkeypatch.setattr(sonicmoe.layer.run, "finish", lambda *given: right(*given) * 1.001)
    code, records = script("--part", "layer", "lora")
    assert code == 1 and "is wrong in out, x" in capsys.readouterr().err
    assert [r["candidate"] for r in records] == ["grouped_mm", "grouped_mm", "PEFT, grouped_mm"]


def test_no_figure_from_wrong_losses(script, capsys, monkeypatch):
    right = adapter.experts
    monkeypatch.setattr(adapter, "experts", lambda *args, **kw: right(*args, **kw) * torch.nan)
    code, records = script("--part", "train")
    assert code == 1 and records == []
    assert "losses differ from eager's" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu_is_explained(script, capsys):
    assert script("--device", "cuda")[0] == 2
    assert "use cpu --tiny" in capsys.readouterr().err
