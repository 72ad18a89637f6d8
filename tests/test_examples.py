"""Every script in examples/ runs, and what it trains gets better."""

import re
import runpy
from pathlib import Path

import pytest
from forked import torchrun

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_learns(example, capsys, tmp_path):
    source = example.read_text()
    assert source.count("\n") <= 65
    if "transformers" in source:
        pytest.importorskip("transformers", reason="comes with the extra 'test'")
    if "\ntorchrun " in source:
        torchrun("--standalone", "--nproc-per-node", "2", str(example), output=tmp_path / "out")
        printed = (tmp_path / "out").read_text()
    else:
        runpy.run_path(str(example), run_name="__main__")
        printed = capsys.readouterr().out
    errors = [float(value) for value in re.findall(r": (?:error|loss) (\d+\.\d+)", printed)]
    assert len(errors) >= 4 and errors[-1] < 0.8 * errors[0], printed
