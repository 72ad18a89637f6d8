"""Starts the process for the tests in Triton's interpreter: see support/devices.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels need Triton, which is for Linux")
ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(0)  # each interpreted test has its own limit
def test_kernels_under_the_interpreter(request):
    """All of them, or without the slow tests a part."""
    part = ["--part"] if "not slow" in request.config.option.markexpr else []
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, *part],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2_000:]
