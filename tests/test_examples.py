"""Every script in examples/ runs, and what it trains gets better."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def printed_by_two_ranks(example: Path) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(example)],
        capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_learns(example, capsys):
    source = example.read_text()
    assert source.count("\n") <= 65
    if "transformers" in source:
        pytest.importorskip("transformers", reason="comes with the extra 'test'")
    if "\ntorchrun " in source:
        printed = printed_by_two_ranks(example)
    else:
        runpy.run_path(str(example), run_name="__main__")
        printed = capsys.readouterr().out
    errors = [float(value) for value in re.findall(r": (?:error|loss) (\d+\.\d+)", printed)]
    assert len(errors) >= 4 and errors[-1] < 0.8 * errors[0], printed
