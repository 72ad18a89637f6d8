"""The script and the command of docs/distributed.md as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()


def test_command_of_the_document_runs(tmp_path):
    script = re.findall(r"^```python torchrun\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[0]
    command = re.findall(r"^torchrun (.*) train\.py$", TEXT, re.MULTILINE)[0].split()
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command, "train.py"],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
