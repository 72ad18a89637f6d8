"""Build both wheels for a package index: their pages need absolute links and the project's URLs.

    python release/wheel.py [folder, by default dist]

pyproject.toml has the address of the repository that is published, under [tool.sonicmoe]; the
repository needs a tag for the version. The last commit is built; nothing in the checkout changes.
"""

import posixpath
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = (".", "trainer")
_RELATIVE = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#|mailto:)(?P<path>[^)]+)\)")


def absolute_links(markdown: str, folder: str, repository: str, version: str) -> str:
    """The text of a file in `folder` with links to the repository at the tag of `version`."""

    def absolute(link: re.Match) -> str:
        kind = "raw" if link["image"] else "blob"
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        address = f"{repository}/{kind}/v{version}/{path}"
        return f"{link['image']}[{link['text']}]({address})"

    return _RELATIVE.sub(absolute, markdown)


def urls(repository: str) -> str:
    """The table [project.urls] of pyproject.toml."""
    pages = {"Repository": "", "Documentation": "/tree/HEAD/docs"}
    pages |= {"Changelog": "/blob/HEAD/CHANGELOG.md", "Issues": "/issues"}
    lines = [f'{name} = "{repository}{page}"' for name, page in pages.items()]
    return "\n".join(["[project.urls]", *lines]) + "\n"


def copy_for_index(copy: Path, repository: str) -> None:
    """Put the last commit into the folder `copy`, with absolute links and the URLs."""
    archive = ["git", "-C", str(ROOT), "archive", "HEAD"]
    commit = subprocess.run(archive, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=BytesIO(commit)) as files:
        files.extractall(copy, filter="data")
    for folder in PROJECTS:
        readme, project = copy / folder / "README.md", copy / folder / "pyproject.toml"
        readme.write_text(absolute_links(readme.read_text(), folder, repository, _version(copy)))
        project.write_text(f"{project.read_text()}\n{urls(repository)}")


def not_ready(root: Path) -> str | None:
    """What a release still lacks."""
    if not re.fullmatch(r"https://\S+[^/\s]", _repository(root)):
        return "pyproject.toml: set [tool.sonicmoe] repository to https://github.com/OWNER/NAME"
    dated = rf"^## {re.escape(_version(root))} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(dated, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        return f"CHANGELOG.md: give the entry of {_version(root)} its date"
    return None


def _repository(root: Path) -> str:
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["sonicmoe"]["repository"]


def _version(root: Path) -> str:
    source = (root / "src/sonicmoe/__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert found is not None
    return found[1]


def main() -> None:
    if len(sys.argv) > 2:
        sys.exit("usage: python release/wheel.py [folder, by default dist]")
    if problem := not_ready(ROOT):
        sys.exit(problem)
    folder = Path(sys.argv[1] if len(sys.argv) == 2 else "dist").absolute()
    with tempfile.TemporaryDirectory() as copy:
        copy_for_index(Path(copy), _repository(ROOT))
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder)]
        sys.exit(subprocess.run([*pip, *(f"{copy}/{name}" for name in PROJECTS)]).returncode)


if __name__ == "__main__":
    main()
