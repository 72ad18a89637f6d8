"""What someone meets who types `sonicmoe` for the first time: help, and errors of one line."""

import argparse
import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_package import in_fresh_python

import sonicmoe
from sonicmoe import cli, extras
from sonicmoe.tools import cost, verify_run


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


def test_the_trainer_is_found_where_it_is_installed(monkeypatch, capsys):
    trainer = SimpleNamespace(
        load=lambda: lambda commands: commands.add_parser("train").set_defaults(run=lambda _: 7)
    )
    for installed, status in (((trainer,), 7), ((), 2)):
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group, _=installed: _)
        assert cli.main(["train", *(["--preset", "demo"] if not installed else [])]) == status
    error = capsys.readouterr().err
    assert error.startswith("sonicmoe train: the trainer is a package of its own. Install it: pip")
    assert error.count("\n") == 1


def test_names_that_moved_to_the_trainer_say_where():
    for module in ("sonicmoe.train", "sonicmoe.train.run"):
        with pytest.raises(ImportError, match=r"now sonicmoe_trainer.*pip install ./trainer"):
            importlib.import_module(module)


def parsers():
    whole = cli.parser()
    (commands,) = (a for a in whole._actions if isinstance(a, argparse._SubParsersAction))
    return {"": whole} | commands.choices


@pytest.mark.parametrize("name", parsers())
def test_help_describes_the_command_and_every_argument(name):
    parser = parsers()[name]
    assert parser.description and parser.description.endswith(".")
    assert [a.dest for a in parser._actions if not a.help and a.dest != "command"] == []


# --- settings are checked before anything is measured ---------------------------------------------
@pytest.fixture
def nothing_runs(monkeypatch):
    """Measuring is a failure of the test."""

    def started(*args, **kwargs):
        raise AssertionError("work started before the arguments were checked")

    monkeypatch.setattr(verify_run, "make_inputs", started)


TINY = ["--device", "cpu", "--shape", "64,32,16,4,2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", *TINY[2:], "--device", "gpu"], "--device: expected cpu or a GPU"),
        (["verify", *TINY[2:], "--device", "mps"], "--device: expected cpu or a GPU"),
        (["verify", *TINY, "--routing", "uniform", "warm"], "--routing: expected one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_refused_at_once(arguments, words, nothing_runs, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    arguments = [a.replace("FILE", str(file)) for a in arguments]
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


# --- names and numbers that agree -----------------------------------------------------------------
def test_gpus_are_found_by_their_names(capsys):
    for name in cost.GPUS:
        for spelled in (name, name.upper()):
            assert cost.find_gpu(spelled) is cost.GPUS[name]
    assert "one of a100, h100" in refused(["cost", "--gpu", "h2000"], capsys)


def test_a_missing_package_comes_with_its_oldest_version_and_our_extra(monkeypatch):
    declared = ["torch>=2.11", 'transformers>=5.17; extra == "hf"', 'rich; extra == "bench"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    assert extras.requirement("transformers") == ("transformers>=5.17", "sonicmoe[hf]")
    assert extras.requirement("rich") == ("rich", "sonicmoe[bench]")
    assert extras.requirement("datasets") == ("datasets", None)
    for package, words in (
        ("transformers", "needs transformers>=5.17. Install it: pip install 'sonicmoe[hf]'"),
        ("datasets", "needs datasets. Install it: pip install 'datasets'"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(extras.MissingExtra, match=re.escape(words)):
            extras.need(package, "Training on text")


def test_the_extras_of_this_package_are_named_for_what_they_bring():
    for package, extra in (
        ("matplotlib", "bench"),
        ("transformers", "hf"),
        ("torchtitan", "titan"),
    ):
        assert extras.requirement(package)[1] == f"sonicmoe[{extra}]"


ROOT = Path(__file__).parents[1]


def test_every_extra_names_the_oldest_version_that_works():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("bench", "hf", "titan"):
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
