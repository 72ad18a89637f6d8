"""The arithmetic of energy; what it says where there is no counter."""

import itertools
import json
import threading
import time

import layer
import pytest
from devices import on
from research.energy import Energy, Watch, watts
from research.layer import energy_table

from sonicmoe.bench.gemms import NAMES


def test_power_is_taken_between_the_moments_at_which_the_counter_moved():
    """At the first look the counter may have stood still for any time: 100 J come too early."""
    assert watts([(0.0, 100.0), (1.0, 150.0), (2.0, 250.0), (4.0, 350.0)]) == pytest.approx(200 / 3)


class SlowBoard:
    def __init__(self) -> None:
        self.counter = itertools.count()
        self.threads: set[int] = set()

    def joules(self) -> float:
        self.threads.add(threading.get_ident())
        time.sleep(0.02)
        return next(self.counter) // 2  # every other look finds the counter where it was

    def mhz(self) -> int:
        return 1400


def test_looking_at_the_counters_does_not_stop_the_host():
    board = SlowBoard()
    with Watch(board) as seen:
        while len(seen.edges) < 3:
            sum(range(1000))
    assert len(board.threads) == 1 and threading.get_ident() not in board.threads
    assert [joules for _, joules in seen.edges][:3] == [0, 1, 2]
    assert len(seen.clocks) == len(seen.edges)
    moments = [moment for moment, _ in seen.edges]
    assert moments == sorted(moments)


def test_a_counter_that_hardly_moved_tells_nothing():
    with pytest.raises(RuntimeError, match="moved 1 times"):
        watts([(0.0, 100.0), (1.0, 150.0)])


def test_table_shows_each_product_beside_the_dense_one():
    ours = Energy("up", flops=2 * 10**12, ms=4.0, watts=700.0, mhz=1400.0)
    dense = Energy("up", flops=2 * 10**12, ms=3.0, watts=690.0, mhz=1500.0)
    row = energy_table([(ours, dense)]).splitlines()[-1]
    assert (
        " ".join(row.replace("|", " ").split())
        == "up 4.000 700 1400 2800 1.400 3.000 690 1500 2070 1.035"
    )


@pytest.mark.parametrize(
    "flag", [["--kernels"], ["--peers", "grouped_mm"], ["--sonicmoe-path", "x"]]
)
def test_energy_is_measured_without_times(flag):
    with pytest.raises(ValueError, match=f"no timing flag with it, got {flag[0]}"):
        layer.main(["--device", "cpu", "--energy", *flag])


def test_without_a_gpu_energy_is_refused_before_anything_is_measured(tmp_path):
    arguments = ["--shape", "64,32,32,4,2", "--device", "cpu", "--energy"]
    with pytest.raises(ValueError, match=r"--energy: expected an NVIDIA GPU.*Leave it out"):
        layer.main([*arguments, "--results", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@on("cuda")
def test_every_product_and_its_dense_counterpart_have_an_energy(tmp_path):
    shape = "16384,2048,1024,16,4"
    assert layer.main(["--shape", shape, "--energy", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("**/*.jsonl")
    record = json.loads(path.read_text())
    for side in ("gemms", "dense_gemms"):
        assert tuple(gemm["name"] for gemm in record[side]) == NAMES
        for gemm in record[side]:
            picojoules = 1e9 * gemm["watts"] * gemm["ms"] / gemm["flops"]
            assert 30 < gemm["watts"] < 3000, gemm  # an idle board, a board on fire
            assert 0.05 < picojoules < 20, gemm
            assert 100 < gemm["mhz"] < 4000, gemm
