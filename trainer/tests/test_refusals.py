"""Mistakes of a newcomer: each is refused in one line, before anything is prepared or trained."""

import json
import sys
from typing import Any

import pytest
import torch

from sonicmoe import cli
from sonicmoe_trainer import corpus, loop, parallel, run
from sonicmoe_trainer.presets import PRESETS


def refused(arguments, capsys) -> str:
    """The one line that `sonicmoe` prints before it ends with status 2."""
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sonicmoe {arguments[0]}: ") and error.count("\n") == 1
    return error


@pytest.fixture
def nothing_runs(monkeypatch):
    """Preparing text and training are failures of the test."""

    def started(*args, **kwargs):
        raise AssertionError("work started before the arguments were checked")

    for module, name in ((corpus, "prepare"), (loop, "Trainer")):
        monkeypatch.setattr(module, name, started)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--router", "nine"], "router: expected one of softmax_over_topk"),
        (["train", "--backend", "nine"], "backend: expected one of auto"),
        (["train", "--data", "no/such/file"], "data: expected 'local', a file"),
        (["train", "--set", "precision=fp8", "--set", "intermediate_size=24"], "multiple of 16"),
        (["train", "--set", "memory=nine"], "memory: expected one of"),
        (["train", "--set", "vocab_size=100"], "vocab_size: expected at least 257"),
        (["train", "--expert-parallel", "2"], "expert_parallel: expected a divisor"),
        (["train", "--name", "a/b"], "--name: expected the name of one folder"),
        (["train", "--name", ".."], "--name: expected the name of one folder"),
        (["train", "--name", ""], "--name: expected the name of one folder"),
        (["train", "--data", ""], "data: expected 'local', a file"),
        (["train", "--runs", "FILE/runs"], "--runs: expected a folder"),
        (["compare", "--routers", "softmax_over_topk,nine"], "router: expected one of"),
        (["compare", "--backends", "torch,nine"], "backend: expected one of auto"),
        (["compare", "--seeds", ""], "--seeds: expected different names"),
        (["compare", "--seeds", "0,x"], "seed: expected a value of type int"),
        (["compare", "--runs", "FILE/runs"], "--runs: expected a folder"),
        (["compare", "--data", "no/such/file"], "data: expected 'local', a file"),
        (["generate", "FILE"], "run: expected the folder of an earlier run"),
        (["export", "FILE", "FILE/out"], "output: expected a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_refused_at_once(arguments, words, nothing_runs, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    arguments = [a.replace("FILE", str(file)) for a in arguments]
    if arguments[0] in ("train", "compare"):
        arguments += ["--device", "cpu", "--preset", "demo"]
        arguments += [] if "--runs" in arguments else ["--runs", str(tmp_path / "runs")]
    assert words in refused(arguments, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_divide_over_eight_ranks(preset):
    for ranks in (1, 2, 4, 8):
        loop.check(PRESETS[preset], parallel.World(0, ranks, torch.device("cpu")))


# --- what can go wrong later ----------------------------------------------------------------------
def test_ctrl_c_ends_with_one_line(monkeypatch, capsys, tmp_path):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "prepare", interrupted)
    arguments = ["train", "--preset", "demo", "--device", "cpu", "--runs", str(tmp_path / "runs")]
    assert cli.main(arguments) == 130
    assert capsys.readouterr().err == "sonicmoe train: stopped\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_run_that_never_started_leaves_nothing(command, monkeypatch, capsys, tmp_path):
    """Here the text is too short, and then the model does not fit."""
    text, runs, cache = tmp_path / "text.txt", tmp_path / "a" / "runs", tmp_path / "cache"
    text.write_text("Too little to learn from.")
    arguments = [command, "--preset", "demo", "--device", "cpu", "--data", str(text), "--runs"]
    arguments += [str(runs), "--cache", str(cache)]
    assert "Pass more text" in refused(arguments, capsys)
    assert not (tmp_path / "a").exists() and not list(cache.iterdir())

    class NoRoom:
        def __init__(self, *args) -> None:
            raise OSError(28, "No space left on device", "checkpoints")

    monkeypatch.setattr(corpus, "prepare", lambda *args: None)
    monkeypatch.setattr(run, "Trainer", NoRoom)
    assert "checkpoints: No space left on device" in refused(arguments, capsys)
    assert not (tmp_path / "a").exists()


def test_a_dataset_that_cannot_be_loaded_is_one_line(monkeypatch, capsys, tmp_path):
    class Library:
        @staticmethod
        def load_dataset(*args, **kwargs):
            raise ConnectionError("Couldn't reach the hub\nsee above")

    monkeypatch.setitem(sys.modules, "datasets", Library)
    arguments = ["train", "--preset", "demo", "--device", "cpu", "--data", "owner/name"]
    arguments += ["--runs", str(tmp_path / "runs"), "--cache", str(tmp_path / "cache")]
    error = refused(arguments, capsys)
    assert "data: expected a dataset that can be loaded, got owner/name (Couldn't reach" in error
    assert "Check the name and the network" in error


GOOD: dict[str, Any] = {"config": PRESETS["demo"].to_dict(), "corpus": "0", "cache": ""}
DAMAGED = (
    *("", "{", "[]", "null", "{}", "\x00"),
    json.dumps(GOOD | {"config": {}}),
    json.dumps(GOOD | {"config": GOOD["config"] | {"model": 3}}),
    json.dumps(GOOD | {"config": GOOD["config"] | {"steps": -1}}),
    json.dumps(GOOD | {"cache": 3}),
)


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.parametrize("command", ["train --resume", "generate", "export"])
def test_a_corrupt_run_json_is_one_line(command, content, tmp_path, capsys):
    (tmp_path / "run.json").write_text(content)
    (tmp_path / "tokenizer.json").write_text("{}")
    more = [str(tmp_path / "out")] if command == "export" else []
    error = refused([*command.split(), str(tmp_path), *more], capsys)
    assert "run: expected a run.json with a configuration" in error
    assert "The file is damaged" in error


@pytest.mark.parametrize("content", [None, "", "{}", '{"added_tokens": []}', "[]"])
@pytest.mark.parametrize("command", ["generate", "export"])
def test_a_corrupt_tokenizer_is_one_line(command, content, tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps(GOOD))
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    more = [str(tmp_path / "out")] if command == "export" else []
    error = refused([command, str(tmp_path), *more], capsys)
    assert (
        "tokenizer: expected the tokenizer.json of a run" in error and "Restore the file" in error
    )
