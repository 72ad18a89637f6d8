"""Two tables in docs/integrations.md, made by the tests themselves.

A test says what it tries: `@pytest.mark.tries("FSDP2", "a rank without tokens")`. These words are
the first table; `make compatibility` runs the tests and adds the versions with which all of a row
passed. `make matrix` runs tests in environments where one version differs from constraints.txt, and
writes a row of the second table for each: `python tests/support/compatibility.py torch==2.11.0`.
"""

import argparse
import ast
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter, defaultdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DOCUMENT = ROOT / "docs" / "integrations.md"
BEGIN, END = "<!-- compatibility:begin -->\n", "<!-- compatibility:end -->\n"
MATRIX = "<!-- matrix:begin -->\n", "<!-- matrix:end -->\n"
HEAD = "| changed | date | tests | passed | skipped | failed |\n|---|---|---|---|---|---|\n"
CELLS = {
    "Python": ["3.12", "3.13"],
    "torch": ["2.11.0", "2.12.1", "2.14.1", "2.15.0"],
    "Triton": ["3.7.1", "3.8.0", "3.9.0"],
    "transformers": ["5.10.0", "5.14.0", "5.17.0", "5.20.0"],
}
KERNELS = r"import triton|machine_code|interpret"
TRANSFORMERS = r"(from|import|importorskip\(.) ?(transformers|peft|hf_models|packed_checkpoints)\b"
# The tests of a cell: their name in the table, what their files contain, and which tests in these.
SELECTED = {
    "Python": ("`make test-fast`", "", ["-m", "not slow"]),
    "torch": ("`make test-fast`", "", ["-m", "not slow"]),
    "Triton": ("all that compile or interpret kernels", KERNELS, []),
    "transformers": (
        "all that use it",
        TRANSFORMERS,
        ["-k", "not test_features or transformers or PEFT"],
    ),
}

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
    """Writes the table after a run of the tests (`--compatibility`); with the name of a cell, its
    row of the matrix (`--cell`)."""

    def __init__(self, document: Path = DOCUMENT, cell: str | None = None) -> None:
        self.document, self.cell = document, cell
        self.outcomes: Counter[str] = Counter()
        self.passed: defaultdict[str, set[str]] = defaultdict(set)
        self.others: set[str] = set()  # frameworks with a test that failed or was skipped

    def pytest_collection_modifyitems(self, items) -> None:
        for item in items:
            item.user_properties += [("tries", m.args) for m in item.iter_markers("tries")]

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        for key, value in report.user_properties:
            if key == "tries" and report.outcome != "passed":
                self.others.add(value[0])
            elif key == "tries" and report.when == "call":
                self.passed[value[0]].add(value[1])

    def pytest_sessionfinish(self, session) -> None:
        if hasattr(session.config, "workerinput"):  # a worker of pytest-xdist
            return
        if self.cell is not None:
            chosen = SELECTED[self.cell.split()[0]][0]
            counts = [self.outcomes[name] for name in ("passed", "skipped", "failed")]
            if session.config.getoption("lf", False):  # of the run before
                _, _, *before = matrix(self.document.read_text())[self.cell]
                counts[:2] = [int(n) + more for n, more in zip(before, counts[:2], strict=False)]
            write_row(self.document, self.cell, [chosen, *map(str, counts)])
        text = self.document.read_text()
        old, versions = written(text)
        for name, what in claims().items():
            if self.passed[name] == set(what) and name not in self.others:
                here = version(FRAMEWORKS[name]).partition("+")[0]
                versions[name] = sorted({*versions.get(name, []), here}, key=_numbers)
        self.document.write_text(text.replace(BEGIN + old + END, BEGIN + table(versions) + END))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


# --- the matrix -----------------------------------------------------------------------------------
def matrix(document: str) -> dict[str, list[str]]:
    """The rows in a document: date, tests and numbers by what changed, as "torch 2.11.0"."""
    text = document.split(MATRIX[0])[1].split(MATRIX[1])[0]
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def write_row(document: Path, cell: str, values: list[str]) -> None:
    """Put the row of a cell into the document, with today's date."""
    text = document.read_text()
    rows = matrix(text) | {cell: [datetime.date.today().isoformat(), *values]}
    not_run = ["", "not run", "", "", ""]
    cells = {name: " | ".join(rows.get(name, not_run)) for name in cell_names()}
    lines = [f"| {name} | {row} |\n" for name, row in cells.items()]
    begin, end = MATRIX
    head, _, rest = text.partition(begin)
    document.write_text(head + begin + HEAD + "".join(lines) + end + rest.partition(end)[2])


def versions_run() -> dict[str, set[tuple[int, ...]]]:
    """The minor versions that the tests passed with: in the matrix, in the environment of
    constraints.txt and on a GPU."""
    found: dict[str, set[tuple[int, ...]]] = {name: set() for name in CELLS}
    rows = matrix(DOCUMENT.read_text())
    texts = [cell for cell, row in rows.items() if row[2] and row[4] == "0"]
    texts.append(ROOT.joinpath("constraints.txt").read_text().replace("==", " "))
    texts.append(ROOT.joinpath(".github/workflows/test.yml").read_text())
    texts.append(ROOT.joinpath("docs/gpu_tests.md").read_text().split("\n\n")[2])
    for name, numbers in found.items():
        for text in texts:
            pattern = rf"^(?:.*\W)?{name}(?:-version:)? \W?(\d+)\.(\d+)"
            for major, minor in re.findall(pattern, text, re.MULTILINE | re.IGNORECASE):
                numbers.add((int(major), int(minor)))
    return found


def cell_names() -> list[str]:
    return [f"{axis} {number}" for axis, numbers in CELLS.items() for number in numbers]


def tests_of(axis: str) -> list[str]:
    """Arguments for pytest; tests of benchmarks run with the versions of constraints.txt alone."""
    _, pattern, options = SELECTED[axis]
    files = [*sorted(TESTS.rglob("test_*.py")), *sorted(ROOT.glob("trainer/tests/test_*.py"))]
    files = [path for path in files if path.parent.name != "bench"]
    return [*options, *(str(path) for path in files if re.search(pattern, path.read_text()))]


def environment(axis: str, number: str) -> Path:
    """The Python of a virtual environment with one other version; what it has not got comes from
    the environment that runs this."""
    folder = ROOT / ".venv-cells" / f"{axis}-{number}"
    python = folder / "bin" / "python"
    if python.exists():
        return python
    base, needs = sys.executable, [f"{axis.lower()}=={number}"]
    if axis == "Python":
        base = shutil.which(f"python{number}") or f"python{number}"
        needs = [
            "--constraint",
            "constraints.txt",
            "--editable",
            ".[test]",
            "--editable",
            "./trainer",
        ]
    elif axis == "transformers":
        needs = [f"transformers[kernels]=={number}"]
    try:
        _quietly(base, "-m", "venv", *[] if axis == "Python" else ["--without-pip"], str(folder))
        if axis != "Python":
            paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
            link = Path(paths["purelib"]) / "parent.pth"
            link.write_text(sysconfig.get_paths()["purelib"])
        pip = str(python), "-m", "pip", "install", "--no-compile"
        _quietly(*pip, "--only-binary=:all:", *needs)
        if axis != "Python":
            _quietly(*pip, "--no-deps", "--no-build-isolation", "--editable", ".")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return python


def _quietly(*command: str) -> None:
    """Run a command; an OSError with the last line that it says, if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise OSError((done.stderr or done.stdout).strip().splitlines()[-1])


def run_cell(cell: str, jobs: str) -> bool:
    """Run the tests of a cell, which write its row; False if they fail or it cannot be had."""
    axis, number = cell.split()
    try:
        python = environment(axis, number)
    except OSError as error:
        print(f"{cell}: {error}", file=sys.stderr)
        write_row(DOCUMENT, cell, ["not run", "", "", ""])
        return False
    command = [str(python), "-m", "pytest", "-n", jobs, "--dist", "worksteal", "--cell", cell]
    command += ["-o", f"cache_dir={python.parents[1] / 'cache'}", *tests_of(axis)]
    sources = os.pathsep.join(str(ROOT / name) for name in ("src", "trainer/src"))
    variables = os.environ | {"PYTHONPATH": sources}
    # What fails runs once more: some tests watch the clock, and machines are busy.
    runs = ([*command, *again] for again in ([], ["--last-failed"]))
    return any(not subprocess.run(run, cwd=ROOT, env=variables).returncode for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=run_cell.__doc__)
    parser.add_argument("cells", nargs="*", help="as torch==2.11.0; by default all")
    parser.add_argument("--jobs", default="2", help="processes of tests")
    parser.add_argument("--list", action="store_true", help="print all cells as JSON")
    args = parser.parse_args()
    if args.list:
        print(json.dumps([name.replace(" ", "==") for name in cell_names()]))
        return
    asked = [cell.replace("==", " ") for cell in args.cells] or cell_names()
    if unknown := set(asked) - set(cell_names()):
        parser.error(f"cells: expected some of {cell_names()}, got {sorted(unknown)}")
    sys.exit(not all([run_cell(cell, args.jobs) for cell in asked]))


if __name__ == "__main__":
    main()
