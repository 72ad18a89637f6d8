from pathlib import Path

import pytest
from workers import Workers

_started: list[Workers] = []


@pytest.fixture(scope="session")
def two():
    yield from _workers(2)


@pytest.fixture(scope="session")
def four():
    yield from _workers(4)


def _workers(size):
    workers = Workers(size)
    _started.append(workers)
    yield workers
    workers.stop()


def pytest_runtest_teardown(nextitem):
    """Every group that a test made wakes a hundred times a second: a tenth of two cores in all."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        for workers in _started:
            workers.stop()
