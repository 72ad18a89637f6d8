"""The board's counters, through `benchmarks/layer.py --energy`."""

import json

import layer
import pytest

from sonicmoe.bench.gemms import NAMES

pytestmark = pytest.mark.gpu


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
