"""One run, one folder, one process that trains in it; and what `--resume` and `export` refuse."""

import contextlib
import errno
import fcntl
import io
import json
import multiprocessing
import os
import socket
import threading

import pytest

from sonicmoe.cli import main
from sonicmoe_trainer import corpus, export, loop, run, runlog


def _contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_no_two_processes_get_the_same_folder(tmp_path):
    together = threading.Barrier(8)
    found = []

    def claim():
        together.wait()
        found.append(run.fresh_folder(tmp_path / "runs", "demo"))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8
    assert all(folder.is_dir() for folder in found)


def test_trainings_started_together_have_folders_of_their_own(command, tmp_path, monkeypatch):
    """The second starts, and ends, while the first is still preparing its text."""
    prepare = corpus.prepare

    def meanwhile(*args):
        monkeypatch.setattr(corpus, "prepare", prepare)
        assert main(command(steps=2, warmup_steps=1, seed=7)) == 0
        return prepare(*args)

    monkeypatch.setattr(corpus, "prepare", meanwhile)
    assert main(command(steps=3, warmup_steps=1)) == 0
    runs = {p.name: len(runlog.read(p)) for p in (tmp_path / "runs").iterdir()}
    assert runs == {"demo": 2 + 1, "demo-2": 3 + 1}  # one validation each


def test_a_run_in_progress_cannot_be_resumed(command, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs" / "demo"
    step, errors = loop.Trainer.train_step, []

    def step_and_resume(self):
        step(self)
        if self.step == 2:
            before = _contents(folder)
            capsys.readouterr()
            assert main(["train", "--resume", str(folder)]) == 2
            assert _contents(folder) == before
            errors.append(capsys.readouterr())

    monkeypatch.setattr(loop.Trainer, "train_step", step_and_resume)
    assert main(command(steps=4, warmup_steps=1, checkpoint_every=1)) == 0
    [(out, err)] = errors
    assert out == ""
    assert err.count("\n") == 1
    assert "no other process trains" in err
    assert str(folder) in err
    assert main(["train", "--resume", str(folder), "--steps", "5"]) == 0  # afterwards it can


def test_a_file_system_without_locks_is_said(tiny, cache, tmp_path, monkeypatch, capsys):
    def unsupported(*args):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    config = tiny.override({"steps": 1, "warmup_steps": 0, "keep": 0})
    assert run.train(config, tmp_path / "run", cache, picture=False)["finished"]
    assert "not locked" in capsys.readouterr().out


def _resume_as_rank(rank, port, folder, answers):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                   "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()) as error:
        status = main(["train", "--resume", str(folder)])
    answers.put((status, error.getvalue()))


def test_every_rank_learns_that_the_run_is_locked(trained):
    """Not started by torchrun, which would end the ranks that wait for a failed one."""
    folder, _ = trained
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = multiprocessing.get_context("fork")
    answers = processes.Queue()
    with contextlib.ExitStack() as held:
        run._lock(folder, held)
        ranks = [
            processes.Process(target=_resume_as_rank, args=(r, port, folder, answers), daemon=True)
            for r in range(2)
        ]
        for rank in ranks:
            rank.start()
        for _ in ranks:
            status, error = answers.get()
            assert status == 2
            assert "no other process trains" in error
        for rank in ranks:
            rank.join()


def test_a_new_run_does_not_mix_with_the_checkpoints_of_another(tiny, cache, trained):
    folder, _ = trained
    before = _contents(folder)
    with pytest.raises(ValueError, match="without checkpoints"):
        run.train(tiny, folder, cache)
    assert _contents(folder) == before


# --- resume ---------------------------------------------------------------------------------------
def test_fewer_steps_than_done_are_refused(trained, capsys):
    folder, _ = trained
    before = _contents(folder)
    assert main(["train", "--resume", str(folder), "--steps", "10"]) == 2
    error = capsys.readouterr().err
    assert "at least 30" in error
    assert "got 10" in error
    assert _contents(folder) == before


def test_a_continued_run_keeps_its_warm_up(tiny, trained):
    assert run.continued(trained[0], {"steps": 15}).warmup_steps == tiny.warmup_steps
    assert run.continued(trained[0], {"warmup_steps": 2}).warmup_steps == 2


@pytest.mark.parametrize("flag", ["--preset", "--name", "--runs"])
def test_what_contradicts_resume_is_refused(trained, capsys, flag):
    assert main(["train", "--resume", str(trained[0]), flag, "demo"]) == 2
    error = capsys.readouterr().err
    assert flag in error
    assert "--resume" in error


def test_a_resumed_run_finds_its_text_without_being_told_where(trained, cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    assert run.cache_of(trained[0]) == cache
    assert main(["train", "--resume", str(trained[0])]) == 0


# --- export ---------------------------------------------------------------------------------------
def test_an_export_that_fails_leaves_nothing(trained, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export.shutil, "copy", full)  # after the weights
    assert main(["export", str(trained[0]), str(tmp_path / "hf")]) == 2
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "hf").mkdir()  # an empty folder is taken
    assert main(["export", str(trained[0]), str(tmp_path / "hf")]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 320


def test_a_router_that_cannot_be_exported_leaves_nothing(trained, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("checkpoints", "tokenizer.json"):
        (folder / name).symlink_to(trained[0] / name)
    record = json.loads((trained[0] / "run.json").read_text())
    record["config"]["model"]["router"] = "expert_choice"
    (folder / "run.json").write_text(json.dumps(record))
    assert main(["export", str(folder), str(tmp_path / "hf")]) == 2
    assert "Qwen3-MoE" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_an_export_does_not_replace_a_file(trained, tmp_path):
    (tmp_path / "mine").write_text("keep")
    assert main(["export", str(trained[0]), str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine").read_text() == "keep"
