"""The layer with every candidate of `sonicmoe tune`; the command on real kernels.

In the interpreter times are made up. On a GPU each tile runs with its deepest ring alone: compiling
every depth would take four minutes. The command itself checks every candidate before it times it.
"""

import itertools
import json
from dataclasses import astuple, replace

import pytest
import torch
from candidate_tables import candidate_tables
from devices import on
from helpers import Case as LayerCase
from helpers import check_experts

from sonicmoe.cli import main
from sonicmoe.launch import grouped_gemm
from sonicmoe.launch.launcher import target_of
from sonicmoe.layer import prepare
from sonicmoe.shapes import Problem
from sonicmoe.tools.cases import Case
from sonicmoe.tools.gemms import NAMES
from sonicmoe.tools.tune_run import tune_cases
from sonicmoe.tools.verify_run import Options
from sonicmoe.tuning import RowConfig, Target, table
from sonicmoe.tuning.table import RowKey

TINY = "33,24,8,3,2"
HERE = Target(90, 4, gluon=False)  # what the interpreter is taken for
OPTIONS = Options(device="cpu", dtype=torch.bfloat16)


@on("interpreter")
@pytest.mark.parametrize(
    ("arch", "transposed", "dtype"),
    [
        *itertools.product([80, 90], [False, True], [torch.bfloat16]),
        (90, False, torch.float32),
    ],
)
def test_the_layer_with_every_candidate(arch, transposed, dtype, monkeypatch):
    target = Target(arch, 4, gluon=False)
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: target)
    gate_up = "concatenated" if transposed else "interleaved"
    case = LayerCase(TINY, dtype, gate_up=gate_up, transposed=transposed, routing="dropped")
    tables = candidate_tables(Problem.parse(TINY), dtype.itemsize, target, transposed)
    assert len(tables) > 3
    for candidate in tables:
        with table.using(candidate):
            check_experts(case, "cpu", "triton")


@pytest.fixture
def layer_runs_kernels(monkeypatch):
    monkeypatch.setattr(prepare, "resolve_backend", lambda backend, x: "triton")


class Clock:
    """Configurations with short blocks take half the time."""

    def __call__(self, call):
        call()
        (config,) = call.args
        return 0.5 if config.block_k == 32 else 1.0


@on("interpreter")
def test_from_cases_to_a_table(tmp_path, layer_runs_kernels, capsys):
    out = tmp_path / "tuned.json"
    cases = [Case.of_shape(TINY), Case.of_shape("40,24,8,3,2")]  # the second differs in T alone
    assert tune_cases(cases, OPTIONS, NAMES, out, Clock()) == []
    printed = capsys.readouterr().out
    assert printed.count("+50.0%") == printed.count("| taken |") == len(NAMES)
    assert all(f"\n| {name} " in printed for name in NAMES)
    assert "6 entries in" in printed
    assert "40,24,8,3,2): the same GEMMs as an earlier case" in printed
    assert f"To use it: export SONICMOE_TUNED={out}" in printed
    entries, complaints = table.read(out, json.loads(out.read_text())["device"], HERE)
    assert len(entries) == 6 and complaints == []
    key, config = table.decode(entries[0])
    assert key == RowKey("up", 2, 24, 16, True) and isinstance(config, RowConfig)
    assert config.block_k == 32


@on("interpreter")
def test_a_wrong_kernel_has_no_figure(tmp_path, layer_runs_kernels, monkeypatch, capsys):
    right = grouped_gemm.down

    def off_by_a_little(a, w2, b2, row_scores, lora, p, config=None, kernel="down"):
        y = right(a, w2, b2, row_scores, lora, p, config, kernel)
        return y * 1.02 if config and config.block_k == 32 else y

    monkeypatch.setattr(grouped_gemm, "down", off_by_a_little)
    out = tmp_path / "tuned.json"
    assert tune_cases([Case.of_shape(TINY)], OPTIONS, ["down"], out, Clock()) == []
    assert json.loads(out.read_text())["entries"] == []
    assert "differs from the default" in capsys.readouterr().err


@on("interpreter")
def test_nothing_is_written_for_a_layer_that_is_wrong(
    tmp_path, layer_runs_kernels, monkeypatch, capsys
):
    right = grouped_gemm.combine
    monkeypatch.setattr(grouped_gemm, "combine", lambda *args: right(*args) * 1.05)
    out = tmp_path / "tuned.json"
    (failure,) = tune_cases([Case.of_shape(TINY)], OPTIONS, ["down"], out, Clock())
    assert "wrong out" in failure
    assert not out.exists() and "gain" not in capsys.readouterr().out


@on("interpreter")
def test_a_table_has_to_go_somewhere(monkeypatch):
    monkeypatch.setenv(table.VARIABLE, "")
    with pytest.raises(ValueError, match=r"--out: expected a file, got none, and SONICMOE_TUNED"):
        tune_cases([Case.of_shape(TINY)], OPTIONS, NAMES, None, Clock())


# --- on a GPU -------------------------------------------------------------------------------------
SHAPE = "777,264,136,6,3"  # wider than every tile, a multiple of none


def each_tile_once():
    """The deepest ring of a tile comes first."""
    seen = set()

    def first(config) -> bool:
        tile = (type(config), *astuple(replace(config, stages=0)))
        return not (tile in seen or seen.add(tile))

    return first


@on("cuda")
def test_the_layer_with_every_tile():
    """In bf16; plain candidates, those of fp32 among them, run in Triton's interpreter."""
    target = target_of(torch.empty(1, device="cuda"))
    p = Problem.parse(SHAPE)
    tables = candidate_tables(p, torch.bfloat16.itemsize, target, only=each_tile_once)
    case = LayerCase(SHAPE, torch.bfloat16, routing="dropped")
    for candidate in tables:
        with table.using(candidate):
            check_experts(case, "cuda", "triton")


@on("cuda")
def test_the_command(tmp_path, monkeypatch, capsys):
    out = tmp_path / "tuned.json"
    monkeypatch.setenv(table.VARIABLE, str(out))
    shape = ["--shape", "4096,512,256,8,2"]
    assert main(["tune", *shape, "--gemm", "down"]) == 0
    assert "down" in capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["device"] == torch.cuda.get_device_name()
    target = target_of(torch.empty(1, device="cuda"))
    assert len(table.tuned(target).rows) == len(document["entries"])
