"""Records on disk and the tables made from them."""

import json

import pytest

from sonicmoe.bench import report, results
from sonicmoe.bench.kernels import Kernel


def record(subject="sonicmoe", case="olmoe", ms=10.0, date="2026-01-01T00:00:00+00:00", **more):
    return {
        "date": date, "device": "GPU 9", "torch": "2", "triton": "3", "dtype": "bfloat16",
        "command": "sonicmoe bench", "case": case, "shape": "32768,2048,1024,64,8", "router": "in",
        "routing": "uniform", "subject": subject, "fwd_ms": ms / 3, "fwd_bwd_ms": ms,
    } | more  # fmt: skip


def test_records_come_back_oldest_first(tmp_path):
    later = record(date="2026-01-02T00:00:00+00:00", kept_mib=1.23456789)
    path = results.write([later], tmp_path, "My label")
    assert path == tmp_path / "gpu-9" / "2026-01-02-my-label.jsonl"
    results.write([record()], tmp_path, "layer")
    found = results.read(tmp_path)
    assert [r["date"][:10] for r in found] == ["2026-01-01", "2026-01-02"]
    assert found[1]["kept_mib"] == 1.2346
    assert results.write([], tmp_path, "layer") is None


def test_provenance_says_where_a_figure_comes_from():
    found = results.provenance("cpu", "sonicmoe bench --device cpu")
    assert {"date", "device", "torch", "triton", "commit", "command", "sonicmoe"} <= set(found)
    assert results.provenance("cpu", "", commit="abc")["commit"] == "abc"
    json.dumps(found)


def test_readme_shows_the_newest_and_the_lost(tmp_path):
    records = [
        record(ms=99.0),
        record(ms=10.0, dense_share=0.9, kept_mib=1033.0, date="2026-01-03T00:00:00+00:00"),
        record("dense", ms=9.0, dense_share=1.0),
        record("published", ms=8.0),
        record("grouped_mm", ms=20.0),
        record(case="7b-fine", ms=3.0, shape="24576,1536,256,128,8"),
        record(case="7b-fine", ms=1.0, routing="zipf"),
        record(case="120b", subject="published", ms=1.0),
    ]
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nstale\n{report.END}\nafter\n")
    report.update_readme(readme, records)
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].split()[0] for line in lines[2:]] == ["7b-fine", "olmoe"]
    assert "3.33 / 10.00" in lines[3] and "**8.00**" in lines[3] and "9.00" in lines[3]
    assert "**3.00**" in lines[2] and "99.00" not in text and "–" in lines[2]
    report.update_readme(readme, records)
    assert readme.read_text() == text


def test_a_readme_without_markers_is_left_alone(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing here\n")
    with pytest.raises(ValueError, match=r"report: expected a file with the lines"):
        report.update_readme(readme, [record()])
    assert readme.read_text() == "nothing here\n"


def test_no_results_is_said():
    assert report.readme_table([]) == "No results are kept yet."


def test_skew_is_shown_against_the_even_routing_of_the_run():
    zipf = record(ms=11.0, routing="zipf", largest_share=0.2)
    assert "1.100" in report.skew_table([record(ms=10.0), zipf])
    assert report.skew_table([zipf]) is None


def test_kernels_are_shown_with_their_share():
    text = report.kernel_table([Kernel("up", 1.0, 3.0), Kernel("down", 2.0, 1.0)])
    assert "75.0%" in text and "4.0000" in text
