"""docs/benchmarks.md, the table of the README and the chart, made from kept records."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from research import chart, document, kept, results

from sonicmoe.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "report.py"
FIRST, SECOND, THIRD = (f"2026-01-0{day}T00:00:00+00:00" for day in (1, 2, 3))
FINE = {"case": "7b-fine", "shape": "24576,1536,256,128,8"}


def record(candidate="sonicmoe", case="olmoe", ms=10.0, date=FIRST, **more):
    return {
        "date": date, "device": "GPU 9", "torch": "2", "triton": "3", "dtype": "bfloat16",
        "command": "python benchmarks/layer.py", "commit": "abc1234", "case": case,
        "shape": "32768,2048,1024,64,8", "router": "in", "routing": "uniform",
        "candidate": candidate, "fwd_ms": ms / 3, "fwd_bwd_ms": ms, "fwd_bwd_tflops": 500.0,
    } | more  # fmt: skip


def section(text: str, title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    body = text.split(f"## {title}\n")[1].split("\n#")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# --- the files in the repository ------------------------------------------------------------------
def test_the_files_are_what_the_generator_makes():
    """If this fails: python benchmarks/report.py"""
    script = runpy.run_path(str(SCRIPT))
    out, readme = ROOT / "docs/benchmarks.md", ROOT / "README.md"
    assert out.read_text() == script["make_document"](ROOT / results.RESULTS, out)
    assert readme.read_text() == script["with_summary"](readme, results.read(ROOT / "benchmarks"))


def test_the_number_in_the_readme_is_the_largest_measured():
    """Of the first sentence: our speed over that of PyTorch's grouped_mm."""
    layers = kept.newest_layers(results.read(ROOT / results.RESULTS))
    best = max(found for f in layers.values() if (found := kept.speedup(f, "grouped_mm")))
    told = re.search(r"up to ([\d.]+) times as fast as PyTorch's", (ROOT / "README.md").read_text())
    assert told and told[1] == f"{best:.1f}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


# --- the generator --------------------------------------------------------------------------------
def test_the_newest_run_counts_won_or_lost():
    text = document.document(
        [
            record(ms=99.0),
            record("published", ms=1.0),
            record(**FINE, ms=3.0, commit="old4567"),
            record("published", **FINE, ms=3.3),
            record(**FINE, ms=1.0, routing="zipf"),
            record(case="120b", candidate="published", ms=1.0),
            record("tune", router=None),
            record(ms=10.0, kept_mib=1033.0, date=THIRD),
            record("dense", ms=9.0, date=THIRD),
            record("published", ms=8.0, date=THIRD),
            record("grouped_mm", ms=20.0, date=THIRD, kept_mib=4000.0),
        ]
    )
    assert section(text, "Time of one layer") == [
        ["7b-fine", FINE["shape"], "1.00 / **3.00**", "1.10 / 3.30", "", "", ""],
        ["olmoe", "32768,2048,1024,64,8", "3.33 / 10.00", "2.67 / **8.00**", "6.67 / 20.00",
         "9.00", "0.90"],
    ]  # fmt: skip
    assert section(text, "Memory") == [["olmoe", "1033", "", "4000"]]
    runs = {(row[0], row[1], row[3]) for row in section(text, "Provenance")}
    assert runs == {
        ("Time of one layer, Memory", "olmoe", "abc1234"),
        ("Time of one layer", "7b-fine", "old4567"),
    }


def test_the_summary_shows_layers_beside_other_implementations():
    text = document.summary(
        [
            record(ms=10.0, kept_mib=1033.0),
            record("dense", ms=9.0),
            record("published", ms=12.0),
            record(**FINE),
        ]
    )
    (row,) = [line for line in text.splitlines() if line.startswith("| olmoe")]
    assert [cell.strip() for cell in row.strip("|").split("|")][2:] == [
        "10.00", "1.20×", "0.90", "1033",
    ]  # fmt: skip
    assert "7b-fine" not in text and document.summary([record()]) == document.NOTHING


def test_only_the_newest_record_of_a_case_is_shown():
    """Of scripts that keep one record for each case, whose fields are their own."""
    packed = {"kind": "packed", "layer": "a", "tokens": 64, "ms": {"bf16": 2.0}}
    peers = {"kind": "packed peers", "layer": "a", "format": "nf4", "tokens": 64, "not timed": {}}
    ours = {"ms": {"ours": 2.0}, "÷ ours to bf16": {"ours": 1.0}, "peak GiB": {"ours": 0.5}}
    graphs = {"kind": "graphs", "layer": "64,8,8,2,1", "precision": "bf16", "mode": "eager"}
    times = {"wall_ms": 3.0, "gpu_busy_ms": 2.0, "wall ÷ gpu_busy": 1.5, "dense_ms": 1.5}
    model = {"part": "model", "shape": "64 tokens, 2 layers, I = 8", "peak_mib": 2048.0}
    text = document.document(
        [
            record(),
            record() | packed | {"÷ bf16": {"bf16": 1.0, "old": 9.0}},
            record(date=SECOND) | packed | {"÷ bf16": {"bf16": 1.0, "nf4": 1.1}},
            record(date=THIRD) | packed | {"÷ bf16": {"bf16": 1.0, "int4": 1.2}, "tokens": 128},
            record() | peers | ours,
            record(date=SECOND) | peers | ours | {"not timed": {"peer": "wrong: dX"}},
            record() | graphs | times | {"wall_ms": 9.0},
            record(date=SECOND) | graphs | times,
            record() | graphs | times | {"mode": "graphed", "profiled": "afterwards"},
            record() | graphs | times | {"layer": "8,8,8,2,1", "profiled": "afterwards"},
            record(**model, ms=7.0),
            record(**model, ms=8.0, date=SECOND),
        ]
    )
    assert section(text, "LoRA on packed experts") == [
        ["a", "64", "2.00", "1.10", ""],
        ["a", "128", "2.00", "", "1.20"],
    ]
    assert section(text, "Packed experts in other packages") == [
        ["a", "nf4", "64", "ours", "2.00", "1.00", "0.5"]
    ]
    assert "Left out: peer (a, nf4: wrong: dX)." in text
    assert section(text, "CUDA graphs") == [
        ["64,8,8,2,1", "bf16", "eager", "3.00", "2.00", "1.50", "0.50"],
        ["64,8,8,2,1", "bf16", "graphed", "3.00", "2.00", "1.50", "0.50"],
        ["8,8,8,2,1", "bf16", "eager", "3.00", "2.00", "1.50", "0.50"],
    ]
    assert "launches may take longer: 64,8,8,2,1.\n" in text
    assert section(text, "Models of transformers") == [["olmoe", "I = 8", "sonicmoe", "8", "2.0"]]


def test_the_roofline_is_that_of_the_cost_model(capsys):
    """Where the power of the GPU was measured, and nowhere else."""
    assert main(["cost", "--case", "olmoe", "--gpu", "h200-measured"]) == 0
    sums = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(("| forward ", "| backward ")):
            name, *_, ms, _ = (cell.strip() for cell in line.strip("|").split("|"))
            sums[name] = float(ms)
    text = document.document([record(device="NVIDIA H200", ms=20.0)])
    roofline = float(section(text, "Time of one layer")[0][4])
    assert roofline == pytest.approx(sums["forward"] + sums["backward"], abs=0.006)
    for other in (record(), record(device="NVIDIA H200", dtype="float32")):
        assert "| roofline |" not in document.document([other]).split("How it was measured")[0]


def test_skew_host_and_cold_start():
    out = {"router": "out"}
    skewed = {"date": SECOND, "command": "python benchmarks/layer.py --routing", **out}
    cold = {"cold_first_call_s": 8.25, "new_tokens_first_ms": 3.5, "new_tokens_steady_ms": 3.4}
    host = {"host_fwd_ms": 0.51, "host_fwd_bwd_ms": 1.24}
    host |= {"graph_host_fwd_ms": 0.04, "graph_host_fwd_bwd_ms": 0.11}
    text = document.document(
        [
            record(ms=10.0, **out),
            record(ms=30.0, routing="zipf", **out),
            record(ms=10.0, **skewed),
            record(ms=10.4, **skewed | {"routing": "zipf"}),
            record(ms=12.0, **skewed | {"routing": "hot"}),
            record(ms=10.0, date=THIRD, **out),
            record("cold", command="python benchmarks/layer.py --cold", **cold),
            record("host", case="host", **host, date=THIRD),
        ]
    )
    assert section(text, "Skewed routing") == [["olmoe", "1.04×", "1.20×"]]
    assert section(text, "Cold start") == [["olmoe", "8.2", "3.50", "3.40"]]
    assert [row[1:] for row in section(text, "Host time")] == [["0.51", "1.24"], ["0.04", "0.11"]]


def test_the_chart_needs_a_peer(tmp_path):
    pytest.importorskip("matplotlib")
    mine = [record(kept_mib=1000.0), record("published", ms=11.0)]
    assert chart.draw(tmp_path / "gpu/layer.png", "GPU 9", "bfloat16", mine)
    assert [path.name for path in tmp_path.glob("gpu/*")] == ["layer.png"]
    assert not chart.draw(tmp_path / "none.png", "GPU 9", "bfloat16", [record()])


def test_the_whole_script(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    results.write([record(), record("published", ms=11.0)], tmp_path / "kept", "layer")
    out, readme = tmp_path / "benchmarks.md", tmp_path / "README.md"
    flags = ["--results", tmp_path / "kept", "--out", out, "--readme", readme]
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, flags)])
    readme.write_text("nothing here\n")
    with pytest.raises(SystemExit, match="--readme: expected a file with the lines"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert readme.read_text() == "nothing here\n"

    readme.write_text(f"before\n{document.BEGIN}\nstale\n{document.END}\nafter\n")
    runpy.run_path(str(SCRIPT), run_name="__main__")
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
    assert "1.10×" in text and "](kept/gpu-9/layer.png)\n" in out.read_text()
