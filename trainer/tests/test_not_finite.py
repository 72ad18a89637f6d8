"""A loss that is not finite ends a run; no checkpoint keeps it, and the advice works."""

import math
import shlex

import pytest
import torch

from sonicmoe.cli import main
from sonicmoe_trainer import checkpoint, loop, run, runlog

ENORMOUS = 1e30  # the first step at this rate is the last whose gradient is finite


def _advised(error: str) -> list[str]:
    return ["--resume", *shlex.split(error.partition("sonicmoe train --resume")[2])]


@pytest.mark.parametrize("log_every", [1, 100])
def test_the_printed_advice_continues_the_run(command, tmp_path, capsys, log_every):
    """With log_every=100 no report sees the step before a checkpoint is due."""
    settings = {"checkpoint_every": 1, "log_every": log_every, "validate_every": 100}
    folder = tmp_path / "runs" / "demo"
    assert main(command(steps=4, warmup_steps=1, **settings)) == 0
    resume = ["train", "--resume", str(folder)]
    assert main([*resume, "--steps", "12", "--learning-rate", str(ENORMOUS)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Step 6 has loss" in error
    assert "The last sound checkpoint is that of step 4." in error
    # From that of step 5, step 6 would be the same whatever the learning rate.
    assert checkpoint.steps(folder / "checkpoints")[-1] == 4
    _assert_finite(folder)

    assert main(["train", *_advised(error)]) == 0
    assert "Continuing after step 4." in capsys.readouterr().out
    assert all(math.isfinite(r["loss"]) for r in runlog.read(folder))
    assert checkpoint.steps(folder / "checkpoints")[-1] == 12
    _assert_finite(folder)


def _assert_finite(folder):
    state = checkpoint.load_latest(folder / "checkpoints")
    assert checkpoint.find_not_finite(state) is None
    assert all(t.isfinite().all() for t in state["model"].values())


def test_without_a_sound_checkpoint_the_advice_is_to_start_again(command, tmp_path, capsys):
    arguments = command(steps=6, warmup_steps=1, checkpoint_every=1)
    assert main([*arguments, "--learning-rate", str(ENORMOUS)]) == 2
    error = capsys.readouterr().err
    assert "no sound checkpoint" in error
    assert checkpoint.steps(tmp_path / "runs" / "demo" / "checkpoints") == []
    advice = shlex.split(error.partition("with ")[2])
    assert main([*arguments, *advice]) == 0


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("weights", "embed.weight is not finite after step 3"),
        ("optimizer", "exp_avg_sq of .* is not finite after step 3"),
        ("validation", "validation loss is nan after step 3"),
    ],
)
def test_no_checkpoint_is_written_after_it(tiny, cache, tmp_path, monkeypatch, broken, words):
    """The update of step 3 breaks the model: the loss of this step, computed before, is finite."""
    step = torch.optim.AdamW.step

    def step_and_break(self, *args, **kwargs):
        step(self, *args, **kwargs)
        first = self.param_groups[0]["params"][0]
        if self.state[first]["step"] == 3:
            tensor = self.state[first]["exp_avg_sq"] if broken == "optimizer" else first.data
            tensor.fill_(math.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", step_and_break)
    if broken != "validation":
        monkeypatch.setattr(loop.Trainer, "_validate", lambda self: None)
    config = tiny.override({"steps": 4, "warmup_steps": 1, "checkpoint_every": 1,
                            "validate_every": 3})  # fmt: skip
    with pytest.raises(FloatingPointError, match=words + ".* sound checkpoint is that of step 2"):
        run.train(config, tmp_path / "run", cache)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [1, 2]
