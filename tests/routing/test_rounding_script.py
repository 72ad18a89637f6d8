"""benchmarks/moe-token-rounding.py from end to end on the CPU."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from research import rounding, rounding_sweep, timing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "moe-token-rounding.py"
TINY = ("--thiekq", "96,32,16,4,2,16", "--rep", "1")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(timing, "_clocked", lambda call, device, budget_s, least: [1.0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def script(monkeypatch, *flags: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *flags])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return done.value.code


@pytest.mark.parametrize("routing", rounding.ROUTINGS)
def test_every_routing(routing, monkeypatch, capsys):
    assert script(monkeypatch, *TINY, "--routing", routing) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1:4:2] for line in printed if line.startswith(f"| {routing} ")] == [
        [routing, "in"],
        [routing, "out"],
    ]
    assert "NOT VERIFIED" not in printed[1]
    assert "0.0% after" in printed[-1] or routing == "top_k"


def test_other_flags(monkeypatch, capsys):
    flags = ("--add_bias", "--concat_layout", "--skip_test", "--dtype", "torch.float32")
    assert script(monkeypatch, *TINY, *flags) == 0
    assert "NOT VERIFIED" in capsys.readouterr().out


def test_bad_shape(monkeypatch):
    for wrong in ("96,32,16,4,2", "96,32,16,4,2,0", "96,32,16,4,2,x"):
        assert "expected six integers" in str(script(monkeypatch, "--thiekq", wrong))


def test_a_wrong_choice_gets_no_figure(monkeypatch, capsys):
    monkeypatch.setattr(rounding, "_same_choice", lambda router, r: False)
    assert script(monkeypatch, *TINY) == 1
    shown = capsys.readouterr()
    assert "keeps other pairs" in shown.err and "fwd ms" not in shown.out


def test_the_sweep(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(rounding_sweep, "SWEEPS", {"96,32,16,E,2": (4, 8)})
    assert script(monkeypatch, "--sweep", "--rep", "1", "--results", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "2/2 | 96,32,16,8,2" in shown and "NR-f 64" in shown
    (kept,) = tmp_path.glob("*/*-rounding.jsonl")
    records = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(r["shape"], r["routing"], r["tile"]) for r in records] == [
        (f"96,32,16,{e},2", *contender) for e in (4, 8) for contender in rounding_sweep.CONTENDERS
    ]
    assert all(r["fwd_bwd_ms"] > 0 and r["rows"] >= 0 for r in records)


def test_a_sweep_with_a_wrong_choice_keeps_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(rounding_sweep, "SWEEPS", {"96,32,16,E,2": (4,)})
    monkeypatch.setattr(rounding, "_same_choice", lambda router, r: False)
    assert script(monkeypatch, "--sweep", "--rep", "1", "--results", str(tmp_path)) == 1
    assert "keeps other pairs" in capsys.readouterr().err and not list(tmp_path.iterdir())
