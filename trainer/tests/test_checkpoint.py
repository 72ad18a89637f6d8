import os
import shutil
import signal
import sys
import time

import forked
import pytest
import torch

from sonicmoe_trainer import checkpoint, run, runlog


def _train(config, folder, cache) -> None:
    finished = run.train(config, folder, cache, picture=False)["finished"]
    sys.exit(0 if finished else 130)


def _wait_for_step(process, folder, step: int) -> None:
    while process.is_alive():
        if any(r["step"] >= step for r in runlog.read(folder)):
            return
        time.sleep(0.005)
    pytest.fail(f"no step {step}; status {process.exitcode}")


def _losses(folder) -> list[tuple]:
    return [(r["kind"], r["step"], r["loss"]) for r in runlog.read(folder)]


@pytest.fixture(scope="module")
def whole(tiny, cache, tmp_path_factory):
    """A run that nothing interrupts, with intervals that do not divide each other: the losses
    between two reports must survive an interruption as well."""
    torch.set_num_threads(1)
    config = tiny.override(
        {"steps": 60, "checkpoint_every": 7, "log_every": 2, "validate_every": 20}
    )
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run.train(config, folder, cache, picture=False)
    return config, folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_run_continues_the_same_curve(whole, cache, tmp_path, number):
    config, uninterrupted = whole
    folder = tmp_path / "interrupted"
    process = forked.start(_train, config, folder, cache)
    _wait_for_step(process, folder, 16)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    last = checkpoint.steps(folder / "checkpoints")[-1]
    assert 14 <= last < config.steps
    if number == signal.SIGKILL:
        assert last % 7 == 0

    run.train(run.continued(folder, {}), folder, cache, resume=True, picture=False)
    assert _losses(folder) == _losses(uninterrupted)
    ends = [checkpoint.load_latest(f / "checkpoints") for f in (uninterrupted, folder)]
    for name, tensor in ends[0]["model"].items():
        assert torch.equal(tensor, ends[1]["model"][name]), name


def test_only_the_newest_are_kept(trained, tiny):
    assert checkpoint.steps(trained[0] / "checkpoints") == [20, 30]
    assert tiny.keep == 2


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no manifest", "missing"])
def test_a_damaged_checkpoint_is_skipped_with_a_message(trained, tmp_path, damage):
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained[0] / "checkpoints", folder)
    newest = folder / "step-00000030"
    state = newest / "state.pt"
    data = state.read_bytes()
    if damage == "truncated":
        state.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        middle = len(data) // 2
        state.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        state.unlink()
    said = []
    assert checkpoint.load_latest(folder, said.append)["step"] == 20
    assert len(said) == 1
    assert "step-00000030 is damaged" in said[0]
    assert "falling back to step 20" in said[0]


def test_a_write_that_was_cut_short_is_never_seen(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"step": 1}, keep=2)

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, 2, {"step": 2}, keep=2)
    monkeypatch.undo()
    assert checkpoint.steps(tmp_path) == [1]
    assert checkpoint.load_latest(tmp_path)["step"] == 1
    checkpoint.save(tmp_path, 2, {"step": 2}, keep=2)  # what the failure left does not disturb
    assert checkpoint.load_latest(tmp_path)["step"] == 2


def test_nothing_to_load_is_said(tmp_path):
    with pytest.raises(ValueError, match="sound checkpoint"):
        checkpoint.load_latest(tmp_path)


def test_a_continued_run_may_change_its_schedule_but_not_its_model(trained):
    changed = run.continued(trained[0], {"steps": 50, "learning_rate": 1e-4})
    assert (changed.steps, changed.learning_rate) == (50, 1e-4)
    for key, value in {"hidden_size": 64, "weight_decay": 0.0, "seed": 1}.items():
        with pytest.raises(ValueError, match=key):
            run.continued(trained[0], {key: value})
