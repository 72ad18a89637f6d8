"""The table in docs/integrations.md, made by the tests themselves.

A test says what it tries: `@pytest.mark.tries("FSDP2", "a rank without tokens")`. These words are
the table; `make compatibility` runs the tests and adds the versions with which all of a row passed.
"""

import ast
import re
from collections import defaultdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "integrations.md"
BEGIN, END = "<!-- compatibility:begin -->\n", "<!-- compatibility:end -->\n"

# The rows in their order, and the package whose version counts.
FRAMEWORKS = {
    "Hugging Face transformers": "transformers",
    "PEFT": "peft",
    "torchtitan": "torchtitan",
    "LoRA": "torch",
    "torch.compile": "torch",
    "activation checkpointing": "torch",
    "FSDP2": "torch",
    "DTensor": "torch",
    "distributed checkpoints": "torch",
    "expert parallelism": "torch",
}


@cache
def claims() -> dict[str, list[str]]:
    """What the marks in the source say, by framework: read, so that nothing need be installed."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py"), key=lambda p: ("integrations" not in p.parts, p)):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        for call in sorted(calls, key=lambda node: node.lineno):
            if ast.unparse(call.func) == "pytest.mark.tries":
                framework, what = map(ast.literal_eval, call.args)
                if what not in found[framework]:
                    found[framework].append(what)
    return dict(found)


def table(versions: dict[str, list[str]]) -> str:
    said = claims()
    lines = ["| with | what is tested | versions tried |", "|---|---|---|"]
    for name, package in FRAMEWORKS.items():
        tried = f"{package} {', '.join(versions[name])}" if versions.get(name) else "none yet"
        lines.append(f"| {name} | {'; '.join(said[name])} | {tried} |")
    return "\n".join(lines) + "\n"


def written(document: str) -> tuple[str, dict[str, list[str]]]:
    """The table as it stands in a document, and its versions."""
    text = document.split(BEGIN)[1].split(END)[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    return text, {row[0]: re.findall(r"\d[\w.]*", row[-1]) for row in rows}


class Recorder:
    """Writes the table after a run of the tests (`--compatibility`)."""

    def __init__(self, document: Path = DOCUMENT) -> None:
        self.document = document
        self.passed: defaultdict[str, set[str]] = defaultdict(set)
        self.others: set[str] = set()  # frameworks with a test that failed or was skipped

    def pytest_collection_modifyitems(self, items) -> None:
        for item in items:
            item.user_properties += [("tries", m.args) for m in item.iter_markers("tries")]

    def pytest_runtest_logreport(self, report) -> None:
        for key, value in report.user_properties:
            if key == "tries" and report.outcome != "passed":
                self.others.add(value[0])
            elif key == "tries" and report.when == "call":
                self.passed[value[0]].add(value[1])

    def pytest_sessionfinish(self, session) -> None:
        if hasattr(session.config, "workerinput"):  # a worker of pytest-xdist
            return
        text = self.document.read_text()
        old, versions = written(text)
        for name, what in claims().items():
            if self.passed[name] == set(what) and name not in self.others:
                here = version(FRAMEWORKS[name]).partition("+")[0]
                versions[name] = sorted({*versions.get(name, []), here}, key=_numbers)
        self.document.write_text(text.replace(BEGIN + old + END, BEGIN + table(versions) + END))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
