"""Records on disk and the tables made from them."""

import json
from pathlib import Path

import pytest

from sonicmoe.bench import readme as section
from sonicmoe.bench import report, results
from sonicmoe.bench.kernels import Kernel
from sonicmoe.cli import main


def record(subject="sonicmoe", case="olmoe", ms=10.0, date="2026-01-01T00:00:00+00:00", **more):
    return {
        "date": date, "device": "GPU 9", "torch": "2", "triton": "3", "dtype": "bfloat16",
        "command": "sonicmoe bench", "commit": "abc1234", "case": case,
        "shape": "32768,2048,1024,64,8", "router": "in",
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


def test_provenance_names_no_folder():
    command = "sonicmoe bench --results /home/me/out --case olmoe --commit abc --out=/tmp/x"
    assert results.provenance("cpu", command, "abc")["command"] == "sonicmoe bench --case olmoe"
    command = "sonicmoe bench --sonicmoe-path /home/me/theirs --host"
    kept = results.provenance("cpu", command, "abc")["command"]
    assert kept == "sonicmoe bench --sonicmoe-path FOLDER --host"


def test_provenance_says_where_a_figure_comes_from():
    found = results.provenance("cpu", "sonicmoe bench --device cpu")
    assert {"date", "device", "torch", "triton", "commit", "command", "sonicmoe"} <= set(found)
    assert results.provenance("cpu", "", commit="abc")["commit"] == "abc"
    json.dumps(found)


FIRST, SECOND, THIRD = (f"2026-01-0{day}T00:00:00+00:00" for day in (1, 2, 3))


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_readme_shows_the_newest_run_and_the_lost(tmp_path):
    records = [
        record(ms=99.0),
        record("published", ms=1.0),
        record(ms=10.0, dense_share=0.9, kept_mib=1033.0, date=THIRD),
        record("dense", ms=9.0, dense_share=1.0, date=THIRD),
        record("published", ms=8.0, date=THIRD),
        record("grouped_mm", ms=20.0, date=THIRD),
        record(case="7b-fine", ms=3.0, shape="24576,1536,256,128,8", commit="old4567"),
        record("published", case="7b-fine", ms=3.3, shape="24576,1536,256,128,8"),
        record(case="7b-fine", ms=1.0, shape="24576,1536,256,128,8", routing="zipf"),
        record(case="120b", subject="published", ms=1.0),
        record("tune", router=None),
    ]
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{section.BEGIN}\nstale\n{section.END}\nafter\n")
    section.update_readme(readme, records, tmp_path)
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
    lines = rows(text)
    assert [line.split("|")[1].split()[0] for line in lines[2:]] == ["7b-fine", "olmoe"]
    assert "3.33 / 10.00" in lines[3] and "**8.00**" in lines[3] and "9.00" in lines[3]
    assert "**3.00**" in lines[2] and "3.30" in lines[2] and "99.00" not in text
    assert "–" in lines[2]  # no dense products in its run
    assert "Faster than the published SonicMoE in 1 of 2 cases: 0.80 to 1.10" in text
    assert "Lowest share of dense: 0.90" in text
    assert "commit abc1234" in text and "commit old4567" in text  # a table may mix sources
    section.update_readme(readme, records, tmp_path)
    assert readme.read_text() == text


def test_the_least_time_is_that_of_the_cost_model(capsys):
    """Where the power of the GPU was measured, and nowhere else."""
    assert main(["cost", "--case", "olmoe", "--gpu", "h200-measured"]) == 0
    sums = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(("forward ", "backward ")):
            name, *_, ms = line.split()
            sums[name] = float(ms)
    text = section.readme_section([record(device="NVIDIA H200", ms=20.0)])
    least = rows(text)[2].split("|")[3]
    forward, both = map(float, least.split("/"))
    assert forward == pytest.approx(sums["forward"], abs=0.006)
    assert both == pytest.approx(sums["forward"] + sums["backward"], abs=0.006)
    assert f"{both / 20:.0%} of that speed" in text
    assert "least" not in section.readme_section([record()])
    assert "least" not in section.readme_section([record(device="NVIDIA H200", dtype="float32")])


def test_the_picture_lies_beside_the_results_and_in_the_readme(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"{section.BEGIN}\n{section.END}\n")
    mine = record(device="NVIDIA H200"), record("published", ms=11.0, device="NVIDIA H200")
    section.update_readme(readme, [*mine, record()], tmp_path / "kept")
    assert [path.relative_to(tmp_path) for path in tmp_path.glob("**/*.png")] == [
        Path("kept/nvidia-h200/layer.png")
    ]
    assert readme.read_text().count("](kept/nvidia-h200/layer.png)\n") == 1


def test_runs_that_differ_in_their_cases_are_one_command():
    small = "64,32,16,4,2"
    text = section.readme_section(
        [
            record(command="sonicmoe bench --case olmoe --host"),
            record(case="120b", shape=small, command="sonicmoe bench --case 120b --host"),
            record(case="mixtral-8x7b", shape=small, command="sonicmoe bench"),
        ]
    )
    assert "`sonicmoe bench --host --case olmoe --case 120b`" in text
    assert "`sonicmoe bench`" in text


def test_a_peer_of_an_older_run_is_not_set_beside_a_newer_figure():
    text = section.readme_section(
        [record(ms=10.0), record("published", ms=8.0), record(ms=9.0, date=SECOND)]
    )
    assert "/ 9.00 |" in text and "8.00" not in text and "published" not in text
    assert "**" not in text and "bold" not in text  # alone, nobody wins


def test_a_tuned_table_is_named():
    assert "sonicmoe tune" in section.readme_section([record(tuned=3)])
    assert "sonicmoe tune" not in section.readme_section([record(tuned=0)])


def test_layers_that_differ_do_not_replace_each_other():
    shape = "64,32,16,4,2"
    text = section.readme_section(
        [
            record(case=shape, shape=shape, ms=1.0),
            record(case=shape, shape=shape, ms=2.0, activation="geglu", bias=True, date=SECOND),
            record(ms=3.0, gate_up="concatenated"),
            record(ms=4.0, date=SECOND),
            record(ms=5.0, dtype="float32", date=SECOND),
        ]
    )
    cases = [line.split("|")[1].strip() for line in rows(text)]
    assert cases[2:6] == [
        "olmoe (32768,2048,1024,64,8)",
        "olmoe (32768,2048,1024,64,8), concatenated",
        shape,
        f"{shape}, geglu, bias",
    ]
    assert cases[6:] == [cases[0], "---", "olmoe (32768,2048,1024,64,8)"]
    assert "GPU 9, bfloat16" in text and "GPU 9, float32" in text


def test_skew_host_cold_start_and_a_new_t_have_their_place():
    out = {"router": "out"}
    cold = {"cold_first_call_s": 8.25, "new_tokens_first_ms": 3.5, "new_tokens_steady_ms": 3.4}
    host = {"host_fwd_ms": 0.51, "host_fwd_bwd_ms": 1.24}
    host |= {"stack_host_fwd_ms": 0.37, "stack_host_fwd_bwd_ms": 0.98}
    host |= {"calling_thread_host_fwd_ms": 0.33, "calling_thread_host_fwd_bwd_ms": 0.77}
    host |= {"module_host_fwd_ms": 0.53, "module_host_fwd_bwd_ms": 1.41}
    host |= {"graph_host_fwd_ms": 0.04, "graph_host_fwd_bwd_ms": 0.11}
    text = section.readme_section(
        [
            record(ms=10.0, **out),
            record(ms=30.0, routing="zipf", **out),
            record(ms=10.0, date=SECOND, command="sonicmoe bench --routing", **out),
            record(ms=10.4, routing="zipf", date=SECOND, command="sonicmoe bench --routing", **out),
            record(ms=12.0, routing="hot", date=SECOND, command="sonicmoe bench --routing", **out),
            record(ms=10.0, date=THIRD, **out),
            record("cold", command="sonicmoe bench --cold", **cold),
            record("host", case="host", **host, date=THIRD),
        ]
    )
    (row,) = [line for line in rows(text) if line.startswith("| olmoe")]
    assert row.endswith("| 1.04× | 1.20× | 8.2 | 3.50 / 3.40 |")
    assert "The host at 64,128,64,8,2, ms forward / forward and backward: " in text
    assert ": a layer alone 0.51 / 1.24; a layer in a stack (8 of them) 0.37 / 0.98; " in text
    assert "set_multithreading_enabled(False)` 0.33 / 0.77; " in text
    assert "`MoE` with its auxiliary loss 0.53 / 1.41; " in text
    assert "captured by `torch.cuda.make_graphed_callables` 0.04 / 0.11." in text
    for command in ("bench --routing`", "bench --cold`", "bench`"):
        assert f"sonicmoe {command}" in text
    assert "3.00×" not in text


def test_ways_to_run_a_layer_are_a_table():
    old = {"plain_fwd_bwd_ms": 9.0, "checkpointed_fwd_bwd_ms": 9.9}
    new = {"plain_fwd_bwd_ms": 3.0, "checkpointed_fwd_bwd_ms": 3.9, "compiled_fwd_bwd_ms": 3.25}
    text = section.readme_section(
        [record("ways", **old), record("ways", date=SECOND, command="sonicmoe bench --ways", **new)]
    )
    (row,) = [line for line in rows(text) if line.startswith("| olmoe")]
    assert row.endswith("| 3.00 | 3.90 | – | – | – | 3.25 |")
    assert "| plain | checkpointed | frozen | main_grad | autocast | compiled |" in text
    assert "`sonicmoe bench --ways`" in text


def test_a_skewed_run_without_an_even_one_gives_no_ratio():
    assert section.readme_section([record(routing="hot", router="out")]) == (
        "No results are kept yet."
    )


def test_a_readme_without_markers_is_left_alone(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing here\n")
    with pytest.raises(ValueError, match=r"report: expected a file with the lines"):
        section.update_readme(readme, [record()], tmp_path)
    assert readme.read_text() == "nothing here\n"


def test_no_results_is_said():
    assert section.readme_section([]) == "No results are kept yet."


def test_skew_is_shown_against_the_even_routing_of_the_run():
    zipf = record(ms=11.0, routing="zipf", largest_share=0.2)
    assert "1.100" in report.skew_table([record(ms=10.0), zipf])
    assert report.skew_table([zipf]) is None


def test_kernels_are_shown_with_their_share():
    text = report.kernel_table([Kernel("up", 1.0, 3.0), Kernel("down", 2.0, 1.0)])
    assert "75.0%" in text and "4.0000" in text
