"""What the tests change in Triton's interpreter: corrections are needed, speed costs no bit.

A process without `fast_interpreter`, and at first without `interpreter`, computes the other side.
"""

import subprocess
import sys

import interpreted_cases
import pytest
import torch
from devices import on
from helpers import bits

pytestmark = on("interpreter")


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory):
    """Results of the interpreter as it comes; results of the corrected one."""
    path = tmp_path_factory.mktemp("unpatched") / "results.pt"
    command = [sys.executable, interpreted_cases.__file__, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(path)


def test_faster_changes_no_bit(unpatched):
    want, got = unpatched[1], interpreted_cases.results()
    assert want.keys() == got.keys()
    different = [name for name in want if not torch.equal(bits(want[name]), bits(got[name]))]
    assert not different


def test_corrections_are_right_and_needed(unpatched):
    a, b, x = interpreted_cases.operands()
    exact = {
        "dot": a.float() @ b.float(),
        "bf16": x.bfloat16(),
        "e4m3": x.to(interpreted_cases.E4M3).view(torch.uint8),
    }
    corrected = interpreted_cases.corrected()
    for name, want in exact.items():
        torch.testing.assert_close(corrected[name], want, rtol=1e-5, atol=1e-5)
        as_it_comes = unpatched[0][name]
        assert not torch.allclose(as_it_comes.float(), want.float(), rtol=1e-5, atol=1e-5), name
