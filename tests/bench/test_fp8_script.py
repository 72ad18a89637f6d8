"""benchmarks/fp8.py on the CPU: its arguments, verification, table, and the parts of its peers."""

import itertools
from types import SimpleNamespace

import fp8 as script
import pytest
import torch
from research import document, fp8, fp8_candidates
from research.fp8_candidates import fp8_linear, padded_layer, padded_rows, rounded

from sonicmoe.bench import results
from sonicmoe.bench.candidates import Candidate
from sonicmoe.bench.cases import Case
from sonicmoe.bench.inputs import make_inputs

CPU = ["--device", "cpu", "--shape", "128,64,32,4,2", "--rounds", "1"]


def inputs():
    return make_inputs(Case.of_shape("256,128,64,4,2"), device="cpu")


def grouped(a, w, ends):
    """The differentiable grouped GEMM of plain FP8 that torchao's candidates have a kernel for."""
    groups = itertools.pairwise([0, *ends.tolist()])
    return torch.cat([fp8_linear(a[b:e], w[i]) for i, (b, e) in enumerate(groups)])


# --- the script -----------------------------------------------------------------------------------
def test_candidates_are_measured_and_what_fails_is_reported(quick, tmp_path, capsys, monkeypatch):
    def broken(inputs):
        raise MemoryError("too large\nand more")

    monkeypatch.setitem(fp8.CANDIDATES, "torchao_rowwise", broken)
    names = ["sonicmoe", "dense", "torchao_rowwise"]
    assert script.main([*CPU, "--candidates", *names, "--results", str(tmp_path)]) == 1
    records = results.read(tmp_path)
    assert [r["candidate"] for r in records] == names
    assert [r.get("ms") for r in records] == [1.0, 1.0, None]
    assert [r.get("failed") for r in records] == [None, None, "MemoryError: too large"]
    assert records[0]["command"].startswith("python benchmarks/fp8.py --device cpu")
    assert 0 < records[0]["error"] < 0.01 and records[1]["tflops"] > 0
    told = capsys.readouterr()
    assert "| dense cuBLAS, bf16 |  1.00 (1.00×) |" in told.out
    assert "torchao, row-wise: `MemoryError: too large`" in told.out
    assert "FAILED 128,64,32,4,2: torchao_rowwise: MemoryError: too large" in told.err


def test_a_candidate_that_breaks_between_turns_does_not_stop_the_others(tmp_path, monkeypatch):
    turns = []

    def breaks_later(name, *given):
        turns.append(name)
        if turns.count("dense") == 2 and name == "dense":
            raise MemoryError("too hot")
        return {"ms": float(len(turns))}

    monkeypatch.setattr(fp8, "sample", breaks_later)
    arguments = [*CPU[:-1], "3", "--candidates", "sonicmoe", "dense"]
    assert script.main([*arguments, "--results", str(tmp_path)]) == 1
    ours, dense = results.read(tmp_path)
    assert turns == ["sonicmoe", "dense", "sonicmoe", "dense", "sonicmoe"]
    assert ours["ms"] == 3.0 and dense["failed"] == "MemoryError: too hot" and "ms" not in dense


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--candidates", "someone"], "--candidates: expected names of sonicmoe, sonicmoe_graphed"),
        (["--case", "gpt-oss-20b"], "--case: expected SwiGLU, no biases, softmax over top-K"),
        (["--peers-path", "/nowhere"], "--peers-path: expected a folder"),
        (["--rounds", "0"], "--rounds: expected at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        script.main(["--device", "cpu", *arguments])


def test_the_default_is_the_five_layers_of_the_readme():
    cases = script.selected_cases(script.parse_args([]))
    assert [case.name for case in cases] == list(script.CASES)


def test_compile_only_calls_each_layer_and_keeps_nothing(tmp_path, monkeypatch):
    called = []

    def layer(inputs):
        forward = lambda: called.append(1) or inputs.x * 1.0  # noqa: E731
        return Candidate("layer", True, forward, {"x": inputs.x}, inputs.dout)

    monkeypatch.setitem(fp8.CANDIDATES, "sonicmoe", layer)
    where = ["--results", str(tmp_path), "--candidates", "sonicmoe", "dense"]
    assert script.main([*CPU, *where, "--compile-only"]) == 0
    assert called == [1] and not list(tmp_path.iterdir())


# --- verification ---------------------------------------------------------------------------------
def test_a_padded_layer_of_fp8_gemms_is_verified():
    """The router is bf16, so its own gradient is checked as well."""
    given = inputs()
    for multiple in (16, 128):
        found = fp8.verified(padded_layer("peer", given, grouped, multiple), given)
        assert [c["tensor"] for c in found["checks"]] == ["out", "x", "w1", "w2", "router_w"]
        assert 0.05 < found["error"] < 0.08


@pytest.mark.parametrize("name", ["sonicmoe_graphed", "sonicmoe_fp8_graphed"])
def test_a_graphed_layer_is_captured_and_verified(name, monkeypatch):
    given, captured = inputs(), []

    def capture(layer, x, other):
        captured.append(layer)
        return layer  # a capture needs a GPU

    monkeypatch.setattr(fp8_candidates, "graphed", capture)
    found = fp8.verified(fp8_candidates.CANDIDATES[name](given), given)
    assert [layer.precision for layer in captured] == ["fp8" if "fp8" in name else None]
    assert (0.05 < found["error"] < 0.08) == ("fp8" in name)


@pytest.mark.parametrize("name", ["sonicmoe_step", "sonicmoe_fp8_step"])
def test_a_step_in_one_graph_is_replayed_and_verified(name, monkeypatch):
    given, replays = inputs(), []

    def capture(step):  # a capture needs a GPU
        found = step()
        return SimpleNamespace(replay=lambda: replays.append(1)), found

    monkeypatch.setattr(fp8_candidates, "captured", capture)
    candidate = fp8_candidates.CANDIDATES[name](given)
    found = fp8.verified(candidate, given)
    assert [c["tensor"] for c in found["checks"]] == ["out", "x", "w1", "w2", "router_w"]
    assert (0.05 < found["error"] < 0.08) == ("fp8" in name)
    assert len(replays) == 1
    candidate.forward_backward()
    assert len(replays) == 2
    with pytest.raises(RuntimeError, match="another upstream gradient"):
        candidate.gradients(candidate.forward(), torch.ones_like(given.dout))


@pytest.mark.parametrize("wrong", ["out", "w1"])
def test_a_wrong_peer_is_refused(wrong):
    given = inputs()

    def gemm(a, w, ends):
        if wrong == "w1" and w.shape[1] == 2 * given.case.problem.I:
            w = w.detach() + 0.8 * (w - w.detach())
        return grouped(a, w, ends) * (1.2 if wrong == "out" else 1.0)

    with pytest.raises(RuntimeError, match=rf"differs from fp64: {wrong} \d"):
        fp8.verified(padded_layer("peer", given, gemm, 16), given)


def test_rows_are_padded_after_the_router_has_chosen():
    ids = torch.tensor([[0, 3], [3, 0], [3, 1], [0, 3], [3, 0]])  # expert 2 has none
    scores = torch.rand(5, 2, requires_grad=True)
    token, row_scores, ends = padded_rows(ids, scores, 4, 4)
    assert ends.tolist() == [4, 8, 8, 16] and ends.dtype == torch.int32
    chosen = [token[b:e][row_scores[b:e] > 0].tolist() for b, e in ((0, 4), (4, 8), (8, 16))]
    assert list(map(sorted, chosen)) == [[0, 1, 3, 4], [2], [0, 1, 2, 3, 4]]
    (gradient,) = torch.autograd.grad(row_scores.sum(), scores)
    assert torch.equal(gradient, torch.ones_like(scores))


def test_rounding_to_e4m3_keeps_the_scale_of_a_row():
    t = torch.tensor([[1.0, 2.0**-20], [2.0**-10, 3.0]], dtype=torch.bfloat16)
    assert torch.equal(rounded(t, 1)[:, 0], torch.tensor([1.0, 2.0**-10], dtype=torch.bfloat16))
    assert rounded(t, 1)[0, 1] == 0 and rounded(t, 0)[1, 1] == 3
    assert rounded(torch.zeros(0, 3), 0).shape == (0, 3)


# --- the table ------------------------------------------------------------------------------------
def record(candidate, ms=None, date="2026-01-01T00:00:00+00:00", **more):
    times = {} if ms is None else {"ms": ms, "tflops": 5000 / ms, "millijoules": 700 * ms}
    return {
        "date": date, "device": "GPU 9", "torch": "2", "triton": "3", "dtype": "bfloat16",
        "command": "python benchmarks/fp8.py", "commit": "abc1234", "case": "olmoe",
        "shape": "32768,2048,1024,64,8", "routing": "uniform", "kind": "fp8",
        "candidate": candidate,
    } | times | more  # fmt: skip


def test_the_document_has_a_row_for_each_candidate_of_the_newest_run():
    text = document.document([
        record("sonicmoe", 99.0, error=0.004),
        *(
            record(*given, date="2026-01-02T00:00:00+00:00", **more)
            for given, more in (
                (("sonicmoe", 20.0), {"error": 0.004}),
                (("sonicmoe_fp8", 12.5), {"error": 0.066}),
                (("weights", 1.0), {"tflops": None}),
                (("torchao_rowwise",), {"failed": "RuntimeError: no"}),
            )
        ),
    ])  # fmt: skip
    body = text.split("### FP8\n")[1].split("\n#")[0]
    lines = [line for line in body.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows == [
        ["ms (speedup)", "olmoe", "error of the output"],
        ["this package, bf16", "20.00", "0.4%"],
        ["this package, FP8", "12.50 (1.60×)", "6.6%"],
        ["quantizing its weights", "1.00", "–"],
        ["torchao, row-wise", "–", "–"],
        ["J", "olmoe"],
        ["this package, bf16", "14.00"],
        ["this package, FP8", "8.75"],
        ["quantizing its weights", "0.70"],
    ]
    assert "olmoe: torchao, row-wise: `RuntimeError: no`" in body
    assert "Time of one layer" not in text
    assert "| FP8   |  olmoe | 2026-01-02 | abc1234 |" in text
