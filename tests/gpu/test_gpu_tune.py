"""Every tile that `sonicmoe tune` tries is right on the GPU at hand; the command from end to end.

Each with its deepest ring alone: compiling every depth would take four minutes. The command itself
checks every candidate before it times it.
"""

import json
from dataclasses import astuple, replace

import pytest
import torch
from candidate_tables import candidate_tables
from helpers import Case, check_experts

from sonicmoe.cli import main
from sonicmoe.launch.launcher import target_of
from sonicmoe.shapes import Problem
from sonicmoe.tuning import table

pytestmark = pytest.mark.gpu
SHAPE = "777,264,136,6,3"  # wider than every tile, a multiple of none


def each_tile_once():
    """The deepest ring of a tile comes first."""
    seen = set()

    def first(config) -> bool:
        tile = (type(config), *astuple(replace(config, stages=0)))
        return not (tile in seen or seen.add(tile))

    return first


def test_the_layer_with_every_tile():
    """In bf16; plain candidates, those of fp32 among them, run in Triton's interpreter."""
    target = target_of(torch.empty(1, device="cuda"))
    p = Problem.parse(SHAPE)
    tables = candidate_tables(p, torch.bfloat16.itemsize, target, only=each_tile_once)
    case = Case(SHAPE, torch.bfloat16, routing="dropped")
    for candidate in tables:
        with table.using(candidate):
            check_experts(case, "cuda", "triton")


def test_the_command(tmp_path, monkeypatch, capsys):
    out = tmp_path / "tuned.json"
    monkeypatch.setenv(table.VARIABLE, str(out))
    shape = ["--shape", "4096,512,256,8,2"]
    assert main(["tune", *shape, "--gemm", "down", "--results", str(tmp_path)]) == 0
    assert "down" in capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["device"] == torch.cuda.get_device_name()
    target = target_of(torch.empty(1, device="cuda"))
    assert len(table.tuned(target).rows) == len(document["entries"])
    (kept,) = tmp_path.glob("*/*-tune.jsonl")
    record = json.loads(kept.read_text())
    assert len(record["candidates"]) > 3 and record["default_ms"] > 0
    assert record["taken"] == bool(document["entries"])
