"""Every kernel on tiny shapes under Triton's interpreter, which needs no GPU.

Triton decides when a kernel is defined whether it will be interpreted. So that the other tests see
the compiler, the interpreted ones live in a folder of their own and run in another process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels need Triton, which is for Linux")
FOLDER = Path(__file__).parent / "interpreted"
PARTS = ["fast", pytest.param("slow", marks=pytest.mark.slow)]


@pytest.mark.timeout(0)  # each interpreted test has its own limit
@pytest.mark.parametrize("part", PARTS)
def test_kernels_under_the_interpreter(part):
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, str(FOLDER), "--part", part],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2_000:]
