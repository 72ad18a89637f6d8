"""Installed beside `sonic-moe`, which has the same import name; where the documentation is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sonicmoe import cli, extras
from sonicmoe.layer import run
from sonicmoe.tools import candidates, doctor

CURE = "pip uninstall -y sonic-moe sonicmoe, then install sonicmoe again."


@pytest.fixture
def site(tmp_path):
    """A folder as pip leaves it after installing the published package, then this one."""
    without = shutil.ignore_patterns("*.bin", "__pycache__")
    shutil.copytree(extras.PACKAGE, tmp_path / "sonicmoe", ignore=without)
    theirs = tmp_path / "sonicmoe" / "functional"
    theirs.mkdir()
    (theirs / "__init__.py").write_text("import quack")
    return tmp_path


def last_line(site: Path, program: str) -> str:
    variables = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-S", "-c", program]  # without another sonicmoe
    done = subprocess.run(command, capture_output=True, text=True, cwd=site, env=variables)
    assert done.returncode != 0
    return done.stderr.splitlines()[-1]


def test_import_beside_the_published_package(site):
    said = last_line(site, "import sonicmoe")
    assert said.startswith("ImportError: Files of sonic-moe and of sonicmoe are mixed in ")
    assert said.endswith(CURE)


def test_the_command_after_the_published_package_was_uninstalled(site):
    """It takes its files along, ours of the same name too: then nothing of ours is imported."""
    shutil.rmtree(site / "sonicmoe/functional")
    for name in ("__init__.py", "moe.py", "enums.py"):
        (site / "sonicmoe" / name).unlink()
    said = last_line(site, "from sonicmoe.cli import main")  # what the script `sonicmoe` does
    assert said.startswith("ImportError: Files of ") and said.endswith(CURE)


def test_this_installation_is_sound():
    assert extras.problem() is None


# --- documentation --------------------------------------------------------------------------------
def test_where_the_documentation_is(monkeypatch, tmp_path, capsys):
    """The folder of a clone, the address of a released wheel, or the README."""
    clone = extras.PACKAGE.parents[1]
    assert cli.main(["docs"]) == 0
    assert capsys.readouterr().out == f"{clone / 'docs'}\n"

    monkeypatch.setattr(extras, "PACKAGE", tmp_path / "site" / "sonicmoe")
    about = tmp_path / "sonicmoe-0.1.0.dist-info"
    about.mkdir()
    head = "Metadata-Version: 2.4\nName: sonicmoe\nVersion: 0.1.0\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    for lines, source, expected in (
        ("Project-URL: Documentation, https://example.org/docs\n", {}, "https://example.org/docs"),
        ("", {"url": clone.as_uri()}, str(clone / "docs")),
        ("", {"url": "file:///no/such/wheel.whl"}, "# SonicMoE"),
    ):
        (about / "METADATA").write_text(f"{head}{lines}\n# SonicMoE\n")
        (about / "direct_url.json").write_text(json.dumps(source))
        assert extras.documentation().strip() == expected


# --- reporting a bug ------------------------------------------------------------------------------
def test_what_a_report_of_a_bug_holds(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path.home() / "kernels"))
    assert cli.main(["doctor", "--report"]) == 0
    said = capsys.readouterr().out
    for words in ("the whole traceback", "torch     ", "transformers ", "both passes on c"):
        assert words in said
    assert "TRITON_CACHE_DIR=~/kernels\n" in said and f"{Path.home()}/" not in said


def test_the_report_says_what_a_layer_raises(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image\nmore")

    monkeypatch.setattr(candidates, "ours", broken)
    assert doctor.check_layer("cpu") == "raises RuntimeError: no kernel image"
    monkeypatch.undo()
    right = run.finish
    monkeypatch.setattr(run, "finish", lambda *given: right(*given) * 1.001)
    assert ", wrong out, x, w1" in doctor.check_layer("cpu")
