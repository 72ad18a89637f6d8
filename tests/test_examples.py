"""Every script in examples/ runs, and what it trains gets better."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
EXAMPLES = {
    "one_layer": [],
    "transformers_finetune": [],
    "lora": [],
    "expert_parallel": TORCHRUN,
}


def test_every_example_is_run():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_learns(name):
    if name == "transformers_finetune":
        pytest.importorskip("transformers", reason="comes with the extra 'test'")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *EXAMPLES[name], str(ROOT / "examples" / f"{name}.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    errors = [float(value) for value in re.findall(r": (?:error|loss) (\d+\.\d+)", done.stdout)]
    assert len(errors) >= 4 and errors[-1] < 0.8 * errors[0], done.stdout
    assert (ROOT / "examples" / f"{name}.py").read_text().count("\n") <= 45
