"""The search of `sonicmoe tune`: right first, ratios within a round, the best once more alone."""

from pathlib import Path

import pytest
import torch

from sonicmoe.cli import main
from sonicmoe.launch import memory
from sonicmoe.tools import tune as search
from sonicmoe.tools import tune_run
from sonicmoe.tools.gemms import Gemm
from sonicmoe.tuning import Target
from sonicmoe.tuning.candidates import candidates
from sonicmoe.tuning.table import RowKey

KEY = RowKey("up", 2, 1536, 512, True)
H200 = Target(90, 132)
DEFAULT, ONE, TWO, *REST = candidates(KEY, H200)


class Bench:
    """A GEMM whose results and times are made up, one by one, for each configuration."""

    def __init__(self, times=None, results=None):
        self.times, self.results, self.calls, self.now = times or {}, results or {}, [], None
        self.right = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.gemm = Gemm("up", KEY, 10**9, self.run)

    def run(self, config):
        self.now = config
        out = memory.empty(self.right.shape, self.right.dtype, self.right.device)
        return (self.results.get(config, torch.Tensor.copy_)(out, self.right),)

    def timer(self, call):
        call()
        self.calls.append(self.now)
        ms = self.times.get(self.now, 1.0)
        return ms(len(self.calls)) if callable(ms) else ms

    def tune(self):
        return search.tune(self.gemm, H200, self.timer)


def test_a_faster_one_is_taken():
    found = Bench({ONE: 0.95, TWO: 0.97}).tune()
    assert (found.best, found.chosen, found.replaces) == (ONE, ONE, True)
    assert found.gain == pytest.approx(0.05) and found.best_ms == 0.95
    assert len(found.times) == 3 + len(REST) and not found.faults


@pytest.mark.parametrize("ms, taken", [(0.99, False), (0.981, False), (0.979, True)])
def test_less_than_two_percent_is_noise(ms, taken):
    found = Bench({ONE: ms}).tune()
    assert found.best == ONE and found.replaces is taken
    assert found.chosen == (ONE if taken else DEFAULT)


def test_the_default_may_be_the_best():
    found = Bench({DEFAULT: 0.9}).tune()
    assert found.best == found.chosen == DEFAULT and found.gain == 0


def _raise(out, right):
    raise RuntimeError("out of resource: shared memory\nmore")


def _one_element(out, right):
    out.copy_(right)[3, 5] += 0.25
    return out


def _half(out, right):
    out[:32].copy_(right[:32])  # the rest stays as it was allocated
    return out


def _rounded_otherwise(out, right):
    return out.copy_(right * (1 + torch.finfo(right.dtype).eps))


@pytest.mark.parametrize(
    "wrong, fault",
    [
        (_raise, "RuntimeError: out of resource: shared memory"),
        (_one_element, "differs from the default in result 0"),
        (_half, "differs from the default in result 0"),
    ],
)
def test_no_figure_for_what_is_wrong(wrong, fault):
    bench = Bench({ONE: 0.1, TWO: 0.9}, {ONE: wrong})
    found = bench.tune()
    assert found.faults == {ONE: fault}
    assert found.best == TWO and ONE not in found.times and ONE not in bench.calls


def test_another_rounding_is_right():
    assert Bench({ONE: 0.9}, {ONE: _rounded_otherwise}).tune().chosen == ONE


def test_a_wrong_default_stops_the_search():
    with pytest.raises(RuntimeError, match="up: the default configuration gives no finite result"):
        Bench(results={DEFAULT: _half}).tune()


def test_a_drifting_clock_decides_nothing():
    """Everything gets slower and slower: the default, timed first in each round, gains nothing."""
    bench = Bench()
    drift = {config: lambda call: 1 + call / 100 for config in candidates(KEY, H200)}
    bench.times = drift | {TWO: lambda call: 0.9 * (1 + call / 100)}
    found = bench.tune()
    assert found.chosen == TWO and found.gain == pytest.approx(0.1, abs=0.02)
    turns = [bench.calls[i :: len(found.times)] for i in range(3)]
    assert [turn[: search.ROUNDS] for turn in turns] == [
        [config] * search.ROUNDS for config in (DEFAULT, ONE, TWO)
    ]


def test_luck_among_many_is_not_enough():
    """The best of the rounds meets the default again, and only that meeting counts."""
    first = search.ROUNDS * len(candidates(KEY, H200))
    found = Bench({TWO: lambda call: 0.9 if call <= first else 1.0}).tune()
    assert found.best == TWO and found.gain == 0 and found.chosen == DEFAULT


# --- the command ----------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_gpu_it_says_what_to_do(device, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--case", "olmoe", "--device", device]) == 2
    said = capsys.readouterr().err
    assert f"--device: expected a GPU of this machine, got {device}" in said and "doctor" in said


def test_it_wants_to_know_the_shapes(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["tune"]) == 2
    assert "--case: expected the shapes to tune for, got none" in capsys.readouterr().err


@pytest.mark.parametrize("failures", [[], ["olmoe: wrong out"]])
def test_what_the_command_asks_for(failures, monkeypatch, capsys):
    asked = []

    def measured(cases, options, names, out):
        asked.extend([[case.name for case in cases], options.dtype, names, out])
        return failures

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune_run, "tune_cases", measured)
    more = ["--gemm", "up", "--out", "mine.json"]
    status = main(["tune", "--case", "olmoe", "--shape", "64,32,16,4,2", *more])
    assert status == len(failures)
    assert asked == [["olmoe", "64,32,16,4,2"], torch.bfloat16, ["up"], Path("mine.json")]
    assert ("FAILED olmoe: wrong out" in capsys.readouterr().err) == bool(failures)
