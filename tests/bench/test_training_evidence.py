"""The script that trains models for evidence, whole, at toy size."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from research import document, training, training_report

from sonicmoe.train.accounting import parameters

ROOT = Path(__file__).parents[2]
TOY = {
    "vocab_size": 320, "context": 32, "num_layers": 1, "hidden_size": 32, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 16, "num_experts": 8, "experts_per_token": 2, "loss_chunk": 0,
    "intermediate_size": 16, "batch": 4, "micro_batch": 4, "rounding_tile": 16, "device": "cpu",
    "validation_fraction": 0.2, "validation_sequences": 4, "precision": "fp32",
}  # fmt: skip


@pytest.fixture
def forks(monkeypatch):
    """Runs in processes that are forked; the whole script spawns them."""
    start = SimpleNamespace(get_context=lambda method: forked.context())
    monkeypatch.setattr(training, "multiprocessing", start)


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
        "--routers", "top-K,token rounding NR-f", "--precision-steps", "4", "--seeds", "0",
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
    assert len(rounding) == 2
    assert {(r["steps"], r["rows_per_expert"]) for r in rounding} == {(20, 32)}
    assert len({r["validation_loss"] for r in rounding}) == len(rounding)
    assert {len(r["validation"]) for r in rounding} == {10}
    pair = [by["agreement", name]["curve"] for name in ("grouped_mm", "torch")]
    assert [x for _, x in pair[0]] == pytest.approx([x for _, x in pair[1]], abs=1e-4)
    assert by["throughput", "scattermoe"]["failed"] == "not installed"
    assert by["throughput", "grouped_mm"]["tokens_per_second"] > 0
    assert by["throughput", "torch, deterministic"]["config"]["deterministic"]

    pairs = [
        by["precision", f"{name}, seed 0, 4 steps"]
        for name in ("autocast", "fp8", "fp8+memory=fp8")
    ]
    assert [r["config"]["precision"] for r in pairs] == ["autocast", "fp8", "fp8"]
    assert [r["config"]["memory"] for r in pairs] == ["keep", "keep", "fp8"]
    assert len({r["validation_loss"] for r in pairs}) == 3

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


def test_side_by_side_is_what_one_after_the_other_is(tmp_path, forks):
    text = write_text(tmp_path / "text")
    base = training.BASE.override({**TOY, "data": str(text)})
    losses = {}
    for jobs, seeds in ((2, "0"), (1, "012")):
        place = training.Place(tmp_path / f"runs{jobs}", tmp_path / "cache")
        records = list(training.rounding(
            base, 32, place, routers=["expert choice", "top-K"], seeds=seeds,
            seconds=0, steps=4, jobs=jobs,
        ))  # fmt: skip
        losses[jobs] = {r["run"]: r["validation"] for r in records}
        assert {r["jobs"] for r in records} == {jobs}
    assert list(losses[2]) == ["expert choice, seed 0", "top-K, seed 0"]
    assert losses[1].items() >= losses[2].items()
    assert len(losses[1]) == 6
    table = training_report.TABLES["rounding"](records)
    assert re.search(r"% ± \d\.\d\d%", table)
    assert "against expert choice" in table


# --- precision ------------------------------------------------------------------------------------
DIVERGES = "fp32+learning_rate=1e30"


def precision(tmp_path, **changes):
    text = tmp_path / "text"
    base = training.BASE.override({**TOY, "data": str(text if text.exists() else write_text(text))})
    place = training.Place(tmp_path / "runs", tmp_path / "cache")
    return list(training.precision(base, place, **changes))


def origin(day: int) -> dict[str, Any]:
    date = f"2026-01-0{day}T00:00:00+00:00"
    return {"date": date, "device": "GPU 9", "torch": "2", "triton": "3", "python": "3.11",
            "commit": f"abc{day}", "command": f"command {day}"}  # fmt: skip


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_lengths_of_training_and_what_a_later_command_adds(tmp_path):
    pytest.importorskip("matplotlib")
    first = precision(
        tmp_path, variants=["fp32", "fp32+learning_rate=3e-3"], seeds="012", lengths=["4", "6"]
    )
    assert len(first) == len({r["run"] for r in first}) == 12
    assert {(r["config"]["steps"], len(r["validation"])) for r in first} == {(4, 4), (6, 6)}
    training.keep(first[:7], tmp_path, origin(1))
    training.keep(first, tmp_path, origin(1))
    later = precision(tmp_path, variants=["fp32", DIVERGES], seeds="0", lengths=["8"])
    training.keep(later, tmp_path, origin(2))

    kept = json.loads((tmp_path / "evidence.json").read_text())
    assert [r["run"] for r in kept["records"]] == [r["run"] for r in first + later]
    assert training_report.origins(kept, kept["records"][:1]) == [origin(1)]
    text = training_report.report(tmp_path)
    assert all(f"`command {day}`" in text for day in (1, 2))
    assert f"- {DIVERGES}, seed 0, 8 steps: FloatingPointError: Step" in text
    assert (tmp_path / "precision.png").read_bytes().startswith(b"\x89PNG")
    rows = cells(text)
    assert [row[:2] + row[-1:] for row in rows] == [
        [steps, name, "3"] for steps in "46" for name in ("fp32", "fp32+learning_rate=3e-3")
    ] + [["8", "fp32", "1"]]
    loss = {r["run"]: r["validation_loss"] for r in first}
    pairs = [[loss[f"{row[1]}, seed {s}, 6 steps"] for s in range(3)] for row in rows[2:4]]
    changes = [b / a - 1 for a, b in zip(*pairs, strict=True)]
    error = statistics.stdev(changes) / 3**0.5
    mean = f"{statistics.fmean(changes):+.2%}"
    within = "yes" if abs(statistics.fmean(changes)) <= 0.0025 else "no"
    assert rows[3][3:7] == [mean, f"{error:.2%}", f"{max(changes):+.2%}", within]


def test_a_run_again_replaces_its_record(tmp_path):
    def record(run, **more):
        return {"experiment": "precision", "run": run, **more}

    rounding = [{"experiment": "rounding", "rows_per_expert": n, "run": "a"} for n in (1, 2)]
    training.keep([record("a", failed="once"), record("b"), *rounding], tmp_path, origin(1))
    training.keep([record("a"), {**rounding[0], "run": "c"}], tmp_path, origin(2))
    kept = json.loads((tmp_path / "evidence.json").read_text())
    found = {(r["experiment"], r["run"], r["date"][9:10]) for r in kept["records"]}
    assert found == {
        ("precision", "b", "1"), ("rounding", "a", "1"), ("precision", "a", "2"),
        ("rounding", "c", "2"),
    }  # fmt: skip
    training.keep([record("a"), record("b"), *rounding], tmp_path, origin(3))
    kept = json.loads((tmp_path / "evidence.json").read_text())
    assert (kept["earlier"], kept["commit"], len(kept["records"])) == ([], "abc3", 4)


def test_a_failed_process_leaves_the_others_alone(tmp_path, capfd, forks):
    failed, trained = precision(
        tmp_path, variants=[DIVERGES, "fp32"], seeds="0", lengths=["4"], jobs=2
    )
    assert failed["failed"].startswith("FloatingPointError: Step 2")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert trained["finished"] and trained["device"].startswith(f"{threads} CPU")
    printed = capfd.readouterr().out
    assert f"FAILED {DIVERGES}, seed 0, 4 steps" in printed and "step " not in printed


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"variants": ["fp9"]}, "precision: expected"),
        ({"variants": ["fp32+z=1"]}, "z: expected the name of a setting"),
        ({"lengths": ["many"]}, "steps: expected"),
    ],
)
def test_a_wrong_variant_is_named_before_any_run(tmp_path, changes, complaint):
    given = {"variants": ["fp32"], "seeds": "0", "lengths": ["4"]}
    with pytest.raises(ValueError, match=complaint):
        precision(tmp_path, **given | changes)
    assert not (tmp_path / "runs").exists()


def test_the_document_shows_precisions(tmp_path):
    config = {"seed": 0}
    records = [
        {"experiment": "precision", "run": f"{name}, seed 0, 9 steps", "finished": True, "steps": 9,
         "config": config, "validation_loss": loss, "parameters": 109_000_000}
        for name, loss in (("autocast", 4.0), ("fp8", 4.02))
    ]  # fmt: skip
    training.keep(records, tmp_path, origin(1))
    evidence = json.loads((tmp_path / "evidence.json").read_text())
    host = {"candidate": "host", "case": "host", "host_fwd_ms": 1.0, "host_fwd_bwd_ms": 2.0}
    measured = [{**origin(2), "dtype": "bfloat16", **host}]
    text = document.document(measured, [evidence])
    section = text.split("### Training in FP8\n")[1].split("\n#")[0]
    assert cells(section)[1] == ["9", "fp8", "4.0200", "+0.50%", "–", "+0.50%", "–", "1"]
    assert "109M parameters" in section and "`command 1`" in text
    assert "Training in FP8" not in document.document(measured, [evidence | {"records": []}])


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
