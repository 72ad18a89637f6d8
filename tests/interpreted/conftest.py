"""These tests run where TRITON_INTERPRET=1 was set before Python started."""

import os

assert os.environ.get("TRITON_INTERPRET") == "1", "run them through test_interpreter_kernels.py"

import interpreter  # noqa: E402, F401 fixes bf16 products


def pytest_addoption(parser):
    parser.addoption(
        "--shard", default="0/1", help="run each n-th test, beginning with test i: i/n"
    )


def pytest_collection_modifyitems(config, items):
    first, step = map(int, config.getoption("--shard").split("/"))
    items[:] = items[first::step]
