"""What someone meets who types `sonicmoe` for the first time: help, and errors of one line."""

import argparse
import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from test_package import in_fresh_python

import sonicmoe
from sonicmoe import cli, extras
from sonicmoe.tools import cost, verify_run
from sonicmoe.train import corpus, hardware, loop, parallel, run
from sonicmoe.train.presets import PRESETS


def refused(arguments, capsys) -> str:
    """The one line that `sonicmoe` prints before it ends with status 2."""
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sonicmoe {arguments[0]}: ") and error.count("\n") == 1
    return error


# --- help -----------------------------------------------------------------------------------------
def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sonicmoe {sonicmoe.__version__}\n"


def parsers():
    whole = cli.parser()
    (commands,) = (a for a in whole._actions if isinstance(a, argparse._SubParsersAction))
    return {"": whole} | commands.choices


@pytest.mark.parametrize("name", parsers())
def test_help_describes_the_command_and_every_argument(name):
    parser = parsers()[name]
    assert parser.description and parser.description.endswith(".")
    assert [a.dest for a in parser._actions if not a.help and a.dest != "command"] == []


# --- settings are checked before anything is measured or trained ----------------------------------
@pytest.fixture
def nothing_runs(monkeypatch):
    """Preparing text, measuring and training are failures of the test."""

    def started(*args, **kwargs):
        raise AssertionError("work started before the arguments were checked")

    for module, name in ((corpus, "prepare"), (loop, "Trainer"), (verify_run, "make_inputs")):
        monkeypatch.setattr(module, name, started)


TINY = ["--device", "cpu", "--shape", "64,32,16,4,2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", *TINY[2:], "--device", "gpu"], "--device: expected cpu or a GPU"),
        (["verify", *TINY[2:], "--device", "mps"], "--device: expected cpu or a GPU"),
        (["verify", *TINY, "--routing", "uniform", "warm"], "--routing: expected one of"),
        (["train", "--router", "nine"], "router: expected one of softmax_over_topk"),
        (["train", "--backend", "nine"], "backend: expected one of auto"),
        (["train", "--data", "no/such/file"], "data: expected 'local', a file"),
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
        (["plan", "--set", "backend=grouped_mm"], "backend: expected one of auto"),
        (["plan", "--set", "router=nine"], "router: expected one of"),
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


WRONG_SIZES = ("64,30,16,4,2", "64,32,20,4,2", "64,32,16,4,5", "64,32,16,40000,2")


@pytest.mark.parametrize("sizes", WRONG_SIZES)
def test_cost_accepts_the_shapes_that_verify_accepts(sizes, nothing_runs, capsys):
    cost_says = refused(["cost", "--shape", sizes], capsys)
    verify_says = refused(["verify", "--device", "cpu", "--shape", sizes], capsys)
    assert cost_says.removeprefix("sonicmoe cost") == verify_says.removeprefix("sonicmoe verify")
    assert " of --shape: expected" in cost_says


def test_cost_wants_tiles_with_rows(capsys):
    assert "--tile-m" in refused(["cost", "--case", "olmoe", "--tile-m", "0"], capsys)


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
    assert "run: expected a tokenizer.json" in error and "Restore the file" in error


# --- names and numbers that agree -----------------------------------------------------------------
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_divide_over_eight_ranks(preset):
    for ranks in (1, 2, 4, 8):
        loop.check(PRESETS[preset], parallel.World(0, ranks, torch.device("cpu")))


def test_gpus_have_the_same_names_everywhere(capsys):
    assert set(hardware.GPUS) == {name for name in cost.GPUS if cost.GPUS[name].power is None}
    for name in hardware.GPUS:
        for spelled in (name, name.upper()):
            assert cost.find_gpu(spelled) is hardware.gpu(spelled) is cost.GPUS[name]
            assert cli.main(["plan", "--gpu", spelled]) == 0
    assert hardware.recognise("NVIDIA H100 80GB HBM3") is cost.GPUS["h100"]
    assert hardware.recognise("NVIDIA A100-SXM4-80GB") is cost.GPUS["a100"]
    assert hardware.recognise("NVIDIA GH200 480GB") is None
    assert "one of a100, h100" in refused(["cost", "--gpu", "h2000"], capsys)


def test_a_missing_package_comes_with_its_oldest_version_and_our_extra(monkeypatch):
    declared = ["torch>=2.11", 'tokenizers>=0.20; extra == "train"', 'rich; extra == "bench"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    assert extras.requirement("tokenizers") == ("tokenizers>=0.20", "sonicmoe[train]")
    assert extras.requirement("rich") == ("rich", "sonicmoe[bench]")
    assert extras.requirement("datasets") == ("datasets", None)
    for package, words in (
        ("tokenizers", "needs tokenizers>=0.20. Install it: pip install 'sonicmoe[train]'"),
        ("datasets", "needs datasets. Install it: pip install 'datasets'"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(extras.MissingExtra, match=re.escape(words)):
            extras.need(package, "Training on text")


def test_the_extras_of_this_package_are_named_for_what_they_bring():
    for package, extra in (
        ("matplotlib", "train"),
        ("transformers", "hf"),
        ("torchtitan", "titan"),
    ):
        assert extras.requirement(package)[1] == f"sonicmoe[{extra}]"


ROOT = Path(__file__).parents[1]


def test_every_extra_names_the_oldest_version_that_works():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("train", "bench", "hf", "titan"):
        assert all(">=" in need for need in project["optional-dependencies"][extra]), extra


def test_an_integration_without_its_framework_says_what_to_install():
    """Also where it is too old to have what is imported from it."""
    packages = ("transformers", "peft", "torchtitan")
    program = f"""
        import importlib, sys, types
        for package in {packages}:
            sys.modules[package] = types.ModuleType(package)
            try:
                importlib.import_module(f"sonicmoe.integrations.{{package}}")
            except ImportError as error:
                print(error)
            del sys.modules[package]
    """
    said = in_fresh_python(program).splitlines()
    assert len(said) == len(packages)
    for line, package in zip(said, packages, strict=True):
        assert line.startswith(f"sonicmoe.integrations.{package} needs {package}")
        extra = {"transformers": "hf", "torchtitan": "titan"}.get(package)
        assert f"pip install '{f'sonicmoe[{extra}]' if extra else 'peft>=0.21'}'" in line


def test_documents_install_from_a_clone_and_say_where_torchtitan_runs():
    documents = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    documents["README.md"] = (ROOT / "README.md").read_text()
    assert [name for name, text in documents.items() if "pip install 'sonicmoe[" in text] == []
    for name in ("README.md", "integrations.md"):
        before = documents[name].partition("-m torchtitan.train")[0]
        assert "a clone of it" in before, name


def test_the_workflow_runs_what_developers_run():
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert "- run: make test" in text and "pull_request:" in text
