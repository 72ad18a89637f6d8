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


SHARDS = {"test_interpreted_layer.py": 3}  # parts of about a minute, which run side by side
PARTS = [
    (path.name, f"{i}/{SHARDS.get(path.name, 1)}")
    for path in sorted(FOLDER.glob("test_*.py"))
    for i in range(SHARDS.get(path.name, 1))
]


@pytest.mark.timeout(1800)  # a part takes minutes on a busy machine
@pytest.mark.parametrize(("name", "shard"), PARTS)
def test_kernels_under_the_interpreter(name, shard):
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, str(FOLDER / name), "--shard", shard],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2_000:]
