import pytest
from workers import Workers


@pytest.fixture(scope="session")
def two():
    yield from _workers(2)


@pytest.fixture(scope="session")
def four():
    yield from _workers(4)


def _workers(size):
    workers = Workers(size)
    yield workers
    workers.stop()
