"""Two processes on one machine: the same training, the weights sharded."""

import json
import os
import subprocess
import sys

import pytest
import torch

from sonicmoe.train import run, runlog

COMMAND = """
import json, sys, torch
from pathlib import Path
from sonicmoe.train import run
from sonicmoe.train.config import TrainConfig
torch.set_num_threads(1)
run.train(TrainConfig.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_two_ranks_train_as_one_and_one_continues_their_run(tiny, cache, tmp_path):
    # The balance loss is a mean over a rank's own tokens, so it is left out here.
    config = tiny.override({"steps": 8, "validate_every": 8, "aux_loss_coef": 0, "batch": 4})
    script = tmp_path / "two.py"
    script.write_text(COMMAND)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), json.dumps(config.to_dict()), str(tmp_path / "two"), str(cache)],
        check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    run.train(config, tmp_path / "one", cache)
    one, two = ([r["loss"] for r in runlog.read(tmp_path / name)] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)

    longer = run.continued(tmp_path / "two", {"steps": 10})
    numbers = run.train(longer, tmp_path / "two", cache, resume=True)
    assert numbers["steps"] == 10
    assert numbers["last_loss"] < numbers["first_loss"]
