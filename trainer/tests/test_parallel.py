"""Several processes on one machine: the same training, the weights or the experts spread."""

import json

import pytest
import torch
from forked import torchrun

from sonicmoe_trainer import checkpoint, parallel, run, runlog

COMMAND = """
import json, sys
from pathlib import Path
from sonicmoe_trainer import run
from sonicmoe_trainer.config import TrainConfig
config, folder, cache, resume = sys.argv[1:]
config = TrainConfig.from_dict(json.loads(config))
run.train(config, Path(folder), Path(cache), resume == "resume", picture=False)
"""
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")


def _train(ranks, config, folder, cache, resume=""):
    """`run.train` in so many processes."""
    script = folder.parent / "train.py"
    script.write_text(COMMAND)
    torchrun(
        "--standalone", "--nproc-per-node", str(ranks), str(script), json.dumps(config.to_dict()),
        str(folder), str(cache), resume,
    )  # fmt: skip


def _losses(folder):
    return [r["loss"] for r in runlog.read(folder)]


@pytest.fixture(scope="module")
def config(tiny):
    # The balance loss is a mean over a rank's own tokens, so it is left out here. The biases of
    # sigmoid routers follow the load of all ranks. 7 sequences do not divide by the ranks.
    return tiny.override({
        "steps": 8, "validate_every": 8, "checkpoint_every": 4, "aux_loss_coef": 0, "batch": 4,
        "micro_batch": 1, "router": "sigmoid", "validation_sequences": 7,
    })  # fmt: skip


@pytest.fixture(scope="module")
def one(config, cache, tmp_path_factory):
    """The run of a single process."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "one"
    run.train(config, folder, cache, picture=False)
    return folder


def test_two_ranks_train_as_one_and_one_continues_their_run(config, one, cache, tmp_path):
    _train(2, config.override({"recompute": True, "micro_batch": 4}), tmp_path / "two", cache)
    assert _losses(tmp_path / "two") == pytest.approx(_losses(one), rel=1e-4)

    longer = run.continued(tmp_path / "two", {"steps": 10})
    numbers = run.train(longer, tmp_path / "two", cache, resume=True, picture=False)
    assert numbers["steps"] == 10
    assert numbers["last_loss"] < numbers["first_loss"]


def _same_end(folder, other):
    assert _losses(folder) == pytest.approx(_losses(other), rel=1e-5)
    ends = [checkpoint.load_latest(f / "checkpoints") for f in (folder, other)]
    for name, tensor in ends[1]["model"].items():
        torch.testing.assert_close(ends[0]["model"][name], tensor, atol=1e-4, rtol=1e-3)


def test_experts_spread_over_two_ranks_train_as_one(config, one, cache, tmp_path):
    spread = config.override({"expert_parallel": 2, "recompute": True})
    _train(2, spread, tmp_path / "spread", cache)
    _same_end(tmp_path / "spread", one)


def test_experts_spread_and_cut_continue_what_one_began(config, one, cache, tmp_path, stop_after):
    """Two ranks share the experts, and FSDP2 cuts them over two such pairs."""
    folder = tmp_path / "spread"
    with stop_after(4):
        assert not run.train(config, folder, cache, picture=False)["finished"]
    _train(4, run.continued(folder, {"expert_parallel": 2}), folder, cache, "resume")
    _same_end(folder, one)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expert_parallel": 3}, ["expert_parallel", "4 process", "torchrun"]),
        ({"expert_parallel": 4, "num_experts": 6}, ["expert_parallel", "num_experts = 6"]),
        ({"expert_parallel": 2, "backend": "grouped_mm"}, ["backend", "grouped_mm", "sonicmoe"]),
    ],
)
def test_what_cannot_be_spread_is_refused(config, change, words):
    world = parallel.World(0, 4, torch.device("cpu"))
    with pytest.raises(ValueError) as caught:
        parallel.check_expert_parallel(config.override(change), world)
    for word in words:
        assert word in str(caught.value)
