"""Records on disk, and the tables that a run prints."""

import json

from sonicmoe.bench import report, results
from sonicmoe.bench.kernels import Kernel
from sonicmoe.bench.tables import table


def record(candidate="sonicmoe", date="2026-01-01T00:00:00+00:00", ms=10.0, **more):
    return {
        "date": date, "device": "GPU 9", "case": "olmoe", "router": "in", "routing": "uniform",
        "candidate": candidate, "fwd_bwd_ms": ms,
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


def test_old_records_are_read_with_todays_names(tmp_path):
    old = [
        {"date": "2026-01-01", "subject": "dense"},
        {"date": "2026-01-02", "subject": "ways", "plain_fwd_bwd_ms": 3.0},
    ]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(r) + "\n" for r in old))
    assert results.read(tmp_path) == [
        {"date": "2026-01-01", "candidate": "dense"},
        {"date": "2026-01-02", "candidate": "modes", "plain_fwd_bwd_ms": 3.0},
    ]


def test_provenance_names_no_folder():
    command = "sonicmoe bench --results /home/me/out --case olmoe --commit abc --out=/tmp/x"
    assert results.provenance("cpu", command, "abc")["command"] == "sonicmoe bench --case olmoe"
    for flag in ("--sonicmoe-path", "--peers-path"):
        command = f"python benchmarks/layer.py {flag} /home/me/theirs --peers"
        kept = results.provenance("cpu", command, "abc")["command"]
        assert kept == f"python benchmarks/layer.py {flag} FOLDER --peers"


def test_provenance_says_where_a_figure_comes_from():
    found = results.provenance("cpu", "sonicmoe bench --device cpu")
    assert {"date", "device", "torch", "triton", "commit", "command", "sonicmoe"} <= set(found)
    assert results.provenance("cpu", "", commit="abc")["commit"] == "abc"
    json.dumps(found)


def test_a_table_is_aligned_markdown():
    assert table(("name", "ms"), [["up", 1.23456], ["down", None], ["all", 12.34]]).split("\n") == [
        "| name |    ms |",
        "|------|------:|",
        "| up   | 1.235 |",
        "| down |     – |",
        "| all  |  12.3 |",
    ]


def test_skew_is_shown_against_the_even_routing_of_the_run():
    zipf = record(ms=11.0, routing="zipf", largest_share=0.2)
    assert "1.100" in report.skew_table([record(ms=10.0), zipf])
    assert report.skew_table([zipf]) is None


def test_kernels_are_shown_with_their_share():
    text = report.kernel_table([Kernel("up", 1.0, 3.0), Kernel("down", 2.0, 1.0)])
    assert "75.0%" in text and "4.0000" in text
