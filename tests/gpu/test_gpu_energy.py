"""The board's counters, through `benchmarks/layer.py --energy`."""

import json

import layer
import pytest

from sonicmoe.bench.products import NAMES

pytestmark = pytest.mark.gpu


def test_every_product_and_its_dense_counterpart_have_an_energy(tmp_path):
    shape = "16384,2048,1024,16,4"
    assert layer.main(["--shape", shape, "--energy", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("**/*.jsonl")
    record = json.loads(path.read_text())
    for side in ("products", "dense_products"):
        assert tuple(product["name"] for product in record[side]) == NAMES
        for product in record[side]:
            picojoules = 1e9 * product["watts"] * product["ms"] / product["flops"]
            assert 30 < product["watts"] < 3000, product  # an idle board, a board on fire
            assert 0.05 < picojoules < 20, product
            assert 100 < product["mhz"] < 4000, product
