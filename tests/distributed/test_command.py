"""The script and the command of docs/distributed.md as they stand there, and the example alone."""

import re
import runpy
from pathlib import Path

from forked import torchrun

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "distributed.md").read_text()


def test_command_of_the_document_runs(tmp_path, monkeypatch):
    script = re.findall(r"^```python torchrun\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[0]
    command = re.findall(r"^torchrun (.*) train\.py$", TEXT, re.MULTILINE)[0].split()
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    torchrun(*command, "train.py")
    assert (tmp_path / "checkpoint" / ".metadata").exists()


def test_example_runs_in_one_process(monkeypatch, capsys):
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(ROOT / "examples" / "expert_parallel.py"), run_name="__main__")
    assert "step 30: loss 0." in capsys.readouterr().out
