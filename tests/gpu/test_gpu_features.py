"""Combinations of the features in tests/features/feature_list.py, on the kernels.

All combinations of precision, memory, biases, LoRA, activation, order of gate and up, frozen parts
and entry point; every triple of all features. A test has the cases with the same kernels.
"""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parents[1] / "features"))

from feature_combinations import Combination, calls, covering, kernels, name_of
from feature_list import case_of
from feature_runs import check, start

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory):
    """Expert parallelism runs in a group of one process."""
    start(str(tmp_path_factory.mktemp("group")))
    yield
    dist.destroy_process_group()


def _failures(combinations: list[Combination]) -> list[str]:
    found = []
    for features in combinations:
        try:
            check(case_of(features), "cuda")
        except Exception as error:
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(f"{name_of(features)}: {words[:300]}")
    return found


@pytest.mark.parametrize("of_kernels", kernels(), ids=name_of)
def test_product(of_kernels):
    combinations = calls(of_kernels)
    found = _failures(combinations)
    assert not found, f"{len(found)} of {len(combinations)} failed:\n" + "\n".join(found)


@pytest.mark.parametrize("combination", covering(strength=3), ids=name_of)
def test_every_triple(combination):
    check(case_of(combination), "cuda")
