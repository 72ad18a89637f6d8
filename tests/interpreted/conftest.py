"""These tests run where TRITON_INTERPRET=1 was set before Python started."""

import os

assert os.environ.get("TRITON_INTERPRET") == "1", "run them through test_interpreter_kernels.py"

import interpreter  # noqa: E402, F401 fixes bf16 GEMMs


def pytest_addoption(parser):
    words = "'fast': every 24th test; 'slow': the others; without it: all"
    parser.addoption("--part", choices=("fast", "slow"), help=words)


def pytest_collection_modifyitems(config, items):
    part = config.getoption("--part")
    if part == "fast":
        items[:] = items[::24]
    elif part == "slow":
        items[:] = [item for i, item in enumerate(items) if i % 24]
