"""What the documents say is run, and what they point to is there."""

import ast
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from quick_start import PUBLISHED_QUICK_START

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "trainer" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))),
]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Without a GPU, examples run with these: plain PyTorch, and sizes that a CPU likes.
ON_CPU = {
    '"cuda"': '"cpu"',
    "KernelBackendMoE.sonicmoe": "KernelBackendMoE.torch",
    "num_experts=128": "num_experts=8",
    "num_experts_per_tok=8": "num_experts_per_tok=2",
    "hidden_size=4096": "hidden_size=64",
    "intermediate_size=1536": "intermediate_size=32",
    "32768, 4096": "16, 64",
}


def run(source: str, names: dict, file: str = "example") -> dict:
    if not torch.cuda.is_available():
        for here, there in ON_CPU.items():
            source = source.replace(here, there)
    exec(compile(source, file, "exec"), names)
    return names


def test_published_quick_start():
    names = run(PUBLISHED_QUICK_START, {})
    assert names["output"].shape == names["x"].shape
    assert names["output"].dtype == torch.bfloat16
    assert names["output"].isfinite().all() and names["aux_loss"].isfinite()


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_python_blocks_run(document):
    """Block after block in one namespace, as a reader would type them; lines as in the document."""
    text, names = document.read_text(), {}
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        run("\n" * line + block[1], names, str(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_what_is_named_exists(document):
    """Links with their anchors, paths, make targets and subcommands."""
    text = document.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), f"link to {target}"
        assert not anchor or anchor in anchors(file), f"link to {target}"
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|trainer)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), f"path {path}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make (\w+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile, f"make {target}"
    for command in set(re.findall(r"(?:`|^)sonicmoe (\w+)", text, re.MULTILINE)):
        assert re.search(rf"\b{command}\b", sonicmoe_help()), f"sonicmoe {command}"


def test_kernels_name_what_exists():
    """Files, functions and arguments in docs/kernels.md."""
    text = (ROOT / "docs" / "kernels.md").read_text()
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    words = set(re.findall(r"\w+", "".join(file.read_text() for file in files)))
    for name in re.findall(r"`([A-Za-z_][\w.]*)(?=[`\[(: ])", text):
        if name.endswith(".py"):
            assert name in {file.name for file in files}, name
        else:
            assert set(name.split(".")) <= words | {file.stem for file in files}, name


def test_pictures_are_up_to_date():
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py"))
    for name, draw in drawn["PICTURES"].items():
        kept = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        assert kept == draw(), "run `python docs/pictures/draw.py`"


def anchors(document: Path) -> list[str]:
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@cache
def sonicmoe_help() -> str:
    program = "import sys; sys.argv[1:] = ['--help']; from sonicmoe.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT / "src"
    ).stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_no_path_of_one_machine(document):
    assert not re.search(r"(?<![\w.])/(?:work|home|root|opt|tmp|usr)/", document.read_text())


def test_readme_says_who_installs_and_then_shows_code():
    lines = (ROOT / "README.md").read_text().splitlines()
    start = lines.index("```python")
    assert lines.index("```", start) < 65
    said = "\n".join(lines[:start])
    order = ["independent implementation", "never run", "When not to use it", "pip install -e .",
             "sonicmoe doctor", "make train", "make test"]  # fmt: skip
    assert sorted(order, key=said.index) == order


def test_readme_has_a_place_for_the_benchmarks():
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- bench:begin -->") == text.count("<!-- bench:end -->") == 1
    assert text.index("<!-- bench:begin -->") < text.index("<!-- bench:end -->")


PACKAGE = ROOT / "src" / "sonicmoe"


MAPS = {"The map": PACKAGE}
MAPS |= {f"The files of `{name}/`": PACKAGE / name for name in ("ops", "layer")}


def the_map(title: str) -> list[str]:
    """Files and folders in the order of the list in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text()
    section = re.split(r"\n##+ ", text.split(f"# {title}\n")[1])[0]
    return re.findall(r"^- `([\w./]+)`:", section, re.MULTILINE)


@pytest.mark.parametrize(("title", "folder"), MAPS.items())
def test_map_of_the_source_is_whole(title, folder):
    """docs/design.md names every file and folder, and no other."""
    there = {path.name for path in folder.glob("[!_]*.py")}
    there |= {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert set(the_map(title)) == there


@pytest.mark.parametrize(("title", "folder"), MAPS.items())
def test_imports_point_up_the_map(title, folder):
    """When a file is imported, it imports only from those above it."""
    order = [name.removesuffix(".py").removesuffix("/") for name in the_map(title)]
    for i, name in enumerate(order):
        path = folder / name
        files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        for file in files:
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ImportFrom) and node.level == 1 + path.is_dir():
                    modules = [node.module] if node.module else [a.name for a in node.names]
                    for module in {m.split(".")[0] for m in modules} & set(order):
                        assert module in order[:i], f"{file.name} imports {module}"
