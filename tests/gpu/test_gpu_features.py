"""Combinations of the features in tests/features/feature_list.py, on the kernels.

All combinations of precision, memory, biases, LoRA, activation, order of gate and up, frozen parts
and entry point; every triple of all features. Cases with the same kernels run one after another in
a process of a pool; each test waits for its own.
"""

import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parents[1] / "features"))

from feature_combinations import Combination, calls, covering, kernels, name_of
from feature_list import case_of
from feature_runs import check, start

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def failures(request):
    """Combinations -> future of what failed, for the tests that were collected."""
    mine = [item for item in request.session.items if item.module is request.module]
    wanted = [item.callspec.params["combinations"] for item in mine]
    workers = min(14, os.cpu_count() or 1, len(wanted))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _start, (workers,)) as pool:
        yield {combinations: pool.submit(_failures, combinations) for combinations in wanted}
        pool.shutdown(cancel_futures=True)


def _start(processes: int) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)  # else each compiles in a thread for each core
    start(tempfile.mkdtemp())


def _failures(combinations: tuple[Combination, ...]) -> list[str]:
    found = []
    for features in combinations:
        try:
            check(case_of(features), "cuda")
        except Exception as error:
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(f"{name_of(features)}: {words[:300]}")
    return found


@pytest.mark.parametrize(
    "combinations", [pytest.param(tuple(calls(f)), id=name_of(f)) for f in kernels()]
)
def test_product(combinations, failures):
    found = failures[combinations].result()
    assert not found, f"{len(found)} of {len(combinations)} failed:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "combinations", [pytest.param((f,), id=name_of(f)) for f in covering(strength=3)]
)
def test_every_triple(combinations, failures):
    assert not failures[combinations].result()
