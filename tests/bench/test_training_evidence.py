"""The script that trains models for evidence, whole, at toy size."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from research import training, training_report

from sonicmoe.train.accounting import parameters

ROOT = Path(__file__).parents[2]
TOY = {
    "vocab_size": 320, "context": 32, "num_layers": 1, "hidden_size": 32, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 16, "num_experts": 8, "experts_per_token": 2, "loss_chunk": 0,
    "intermediate_size": 16, "batch": 4, "micro_batch": 4, "rounding_tile": 16, "device": "cpu",
    "validation_fraction": 0.2, "validation_sequences": 4, "precision": "fp32",
}  # fmt: skip


def write_text(folder: Path) -> Path:
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"Number {i} is {i * i} when squared, {i**3} cubed. " * 20)
    return folder


def test_the_whole_script(tmp_path):
    pytest.importorskip("matplotlib")
    text = write_text(tmp_path / "text")
    arguments = [
        "--rows-per-expert", "32", "--seconds-per-run", "0.1", "--no-compile",
        "--agreement", "grouped_mm,torch", "--agreement-steps", "4",
        "--backends", "torch,grouped_mm,scattermoe", "--commit", "abc",
        "--precision-steps", "10",
    ]  # fmt: skip
    settings = [x for k, v in {**TOY, "data": text}.items() for x in ("--set", f"{k}={v}")]
    folders = [x for k in ("output", "runs", "cache") for x in (f"--{k}", str(tmp_path / k))]
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "training_evidence.py", *arguments, *settings,
         *folders], check=True, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip

    kept = json.loads((tmp_path / "output" / "evidence.json").read_text())
    assert kept["commit"] == "abc"
    assert "--rows-per-expert 32" in kept["command"]
    assert "--cache" not in kept["command"]
    by = {(r["experiment"], r["run"]): r for r in kept["records"]}
    rounding = [r for r in kept["records"] if r["experiment"] == "rounding"]
    assert len(rounding) == 2 * len(training.ROUTERS)
    assert {(r["steps"], r["rows_per_expert"]) for r in rounding} == {(20, 32)}
    assert len({r["validation_loss"] for r in rounding}) == len(rounding)
    assert {len(r["validation"]) for r in rounding} == {10}
    pair = [by["agreement", name]["curve"] for name in ("grouped_mm", "torch")]
    assert [x for _, x in pair[0]] == pytest.approx([x for _, x in pair[1]], abs=1e-4)
    assert by["throughput", "scattermoe"]["failed"] == "not installed"
    assert by["throughput", "grouped_mm"]["tokens_per_second"] > 0
    assert by["throughput", "torch, deterministic"]["config"]["deterministic"]

    pairs = [by["precision", f"{name}, seed {s}"] for name in ("autocast", "fp8") for s in (0, 1)]
    assert [r["config"]["precision"] for r in pairs] == ["autocast"] * 2 + ["fp8"] * 2
    assert len({r["validation_loss"] for r in pairs}) == 4

    report = (tmp_path / "output" / "evidence.md").read_text()
    for words in (
        "against top-K",
        "against autocast",
        "not installed",
        "farthest from the last",
        "passes over the text",
    ):
        assert words in report
    for picture in ("rounding-32.png", "agreement.png", "precision.png"):
        assert picture in report
        assert (tmp_path / "output" / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "kept", sorted(ROOT.glob("benchmarks/results/*/training/*")), ids=lambda p: p.name
)
def test_the_kept_report_is_what_the_kept_numbers_say(kept, tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copy(kept / "evidence.json", tmp_path)
    assert training_report.report(tmp_path) + "\n" == (kept / "evidence.md").read_text()
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in kept.iterdir()}


def test_side_by_side_is_what_one_after_the_other_is(tmp_path):
    text = write_text(tmp_path / "text")
    base = training.BASE.override({**TOY, "data": str(text)})
    losses = {}
    for jobs in (1, 2):
        place = training.Place(tmp_path / f"runs{jobs}", tmp_path / "cache")
        records = training.rounding(
            base, 32, place, routers=["expert choice", "top-K"], seeds=["0", "1", "2"],
            seconds=0, steps=4, jobs=jobs,
        )  # fmt: skip
        losses[jobs] = {r["run"]: r["validation"] for r in records}
        assert {r["jobs"] for r in records} == {jobs}
    assert list(losses[1]) == list(losses[2])
    assert losses[1] == losses[2]
    assert len(losses[1]) == 6
    table = training_report.TABLES["rounding"](records)
    assert re.search(r"% ± \d\.\d\d%", table)
    assert "against expert choice" in table


def test_an_unknown_router_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"--routers.*top-k"):
        training.rounding(
            training.BASE, 32, training.Place(tmp_path, tmp_path), routers=["top-k"],
            seeds=["0"], seconds=0,
        )  # fmt: skip


def test_the_real_sizes_are_what_the_documents_say():
    for rows, experts, millions in ((512, 64, 109), (256, 128, 210), (128, 256, 411)):
        model = training.with_rows(training.BASE, rows).model
        assert model.num_experts == experts
        assert parameters(model).total == pytest.approx(millions * 1e6, rel=0.01)
    assert parameters(training.THROUGHPUT.model).total == pytest.approx(1.44e9, rel=0.01)
    with pytest.raises(ValueError, match="divisor"):
        training.with_rows(training.BASE, 500)
