"""Every activation × dtype × bias × gate/up layout × weight storage against fp64.

Nearly every case compiles kernels of its own, so they run in a pool of processes; each test waits
for its own case.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from helpers import check_experts, matrix

pytestmark = pytest.mark.gpu

# H and I multiples of 8 but of no tile; more than one tile a product in every direction; rows that
# fill several tiles of the popular experts and less than one of the others; dropped slots.
CASES = matrix("333,264,136,6,3", routing="dropped")


@pytest.fixture(scope="module")
def outcome(request):
    """case -> future of its check, for the cases that were collected."""
    mine = [item for item in request.session.items if item.module is request.module]
    wanted = [item.callspec.params["case"] for item in mine]
    workers = min(12, os.cpu_count() or 1, len(wanted))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield {case: pool.submit(_check, case) for case in wanted}
        pool.shutdown(cancel_futures=True)


def _check(case) -> None:
    torch.set_num_threads(1)
    check_experts(case, "cuda", "triton")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_is_within_the_budget(case, outcome):
    outcome[case].result()
