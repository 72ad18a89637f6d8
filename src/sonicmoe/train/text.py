"""Where text comes from: this installation, files and folders, or a Hugging Face dataset.

Every source is a stream of `Document`s in an order that depends on nothing but the names of the
files, so that two runs on one machine see the same text.
"""

import gzip
import inspect
import itertools
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import bad_argument
from .extras import need

_PROSE = {".txt", ".md", ".rst", ".text", ".tex", ".org", ".adoc", ".pod"}
_PROSE_NAMES = ("readme", "license", "licence", "copying", "notice", "copyright", "news",
                "metadata", "authors", "contributing", "howto", "faq")  # fmt: skip
_CODE = {
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cpp",
    ".hpp",
    ".cu",
    ".cuh",
    ".js",
    ".ts",
    ".rs",
    ".go",
    ".java",
}
_DOCSTRING = re.compile(
    r"""(?:\A(?:\s*\#[^\n]*\n|\s)*|:[ \t]*\n\s*)[rR]?"""
    r"""(?P<quote>\"{3}|'{3})(?P<text>.*?)(?P=quote)""",
    re.S,
)
_LARGEST_FILE = 64 * 2**20
_SECTION = 16384  # characters
_SHORTEST = 200  # characters; shorter documents teach nothing


@dataclass(frozen=True, slots=True)
class Document:
    kind: str
    name: str
    text: str


def documents(sources: Iterable[str], include_code: bool) -> Iterator[Document]:
    """The documents of every source in `sources`, one source after the other."""
    for source in sources:
        if source == "local":
            yield from installation(include_code)
        elif Path(source).expanduser().exists():
            yield from files(Path(source).expanduser())
        elif source.count("/") == 1 and not source.startswith((".", "/", "~")):
            yield from dataset(source)
        else:
            raise bad_argument(
                "data", "'local', a file, a folder or a dataset name owner/name", repr(source),
                "Check the path.",
            )  # fmt: skip


def installation(include_code: bool) -> Iterator[Document]:
    """The kinds take turns: what a small budget takes is then a mixture of all of them."""
    python = _sources if include_code else _docstrings
    what = "source" if include_code else "docstrings"
    yield from _take_turns(
        [
            _prose_files("system documentation", [Path("/usr/share/doc")], packed=True),
            _prose_files("dictionaries", [Path("/usr/share/dictd")], packed=True),
            _prose_files("readmes and licences of packages", site_packages()),
            python(f"{what} of the standard library", [_path("stdlib")]),
            python(f"{what} of installed packages", site_packages()),
        ]
    )


def files(path: Path) -> Iterator[Document]:
    """Of a folder, everything below it that looks like text or source. A single file is cut into
    sections at paragraph ends, so that there is something to hold out."""
    if path.is_file():
        text = read_text(path)
        if text is None:
            raise bad_argument("data", "a text file", f"{path}, which is not text", "Convert it.")
        for i, section in enumerate(_sections(text)):
            yield from _document("files", f"{path}#{i}", section)
        return
    for file in walk(path):
        if _stem_suffix(file) in _PROSE | _CODE or _is_prose_name(file):
            yield from _document("files", file, read_text(file))


def dataset(name: str) -> Iterator[Document]:
    """`owner/name` or `owner/name:configuration`, streamed; the column `text` is read."""
    library = need("datasets", f"data={name} (no file of that name exists)")
    path, _, configuration = name.partition(":")
    stream = library.load_dataset(path, configuration or None, split="train", streaming=True)
    for i, row in enumerate(stream):
        if "text" not in row:
            raise bad_argument(
                "data", "a dataset with a column named text", f"{name} with {', '.join(row)}",
                "Save the column you want as text files and pass the folder.",
            )  # fmt: skip
        if len(row["text"]) >= _SHORTEST:
            yield Document("dataset", f"{name}#{i}", row["text"])


def read_text(path: Path) -> str | None:
    """The text of a file, unpacked if it is gzip or dictzip; None if it is not text."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            return None
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return None if b"\0" in data[:4096] else data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, gzip.BadGzipFile):
        return None


def docstrings(source: str) -> str:
    """The docstrings of a module, its classes and its functions, in their order, dedented.

    By pattern: a string in triple quotes at the start of the file or of an indented block. Parsing
    would be exact and takes thirty times as long.
    """
    return "\n\n".join(inspect.cleandoc(m["text"]) for m in _DOCSTRING.finditer(source))


def _document(kind: str, path: Path | str, text: str | None) -> Iterator[Document]:
    if text is not None and len(text) >= _SHORTEST:
        yield Document(kind, str(path), text)


def _sections(text: str) -> Iterator[str]:
    section: list[str] = []
    for paragraph in text.split("\n\n"):
        section.append(paragraph)
        if sum(map(len, section)) >= _SECTION:
            yield "\n\n".join(section)
            section = []
    yield "\n\n".join(section)


def _prose_files(kind: str, folders: list[Path], packed: bool = False) -> Iterator[Document]:
    for path in itertools.chain.from_iterable(map(walk, folders)):
        suffix = _stem_suffix(path)
        if "changelog" in path.name.lower() or path.name.endswith("requirements.txt"):
            continue
        if suffix in _PROSE or _is_prose_name(path) or (packed and suffix in (".gz", ".dict")):
            yield from _document(kind, path, read_text(path))


def _docstrings(kind: str, folders: list[Path]) -> Iterator[Document]:
    for path in _python_files(folders):
        yield from _document(kind, path, docstrings(read_text(path) or ""))


def _sources(kind: str, folders: list[Path]) -> Iterator[Document]:
    for path in _python_files(folders):
        yield from _document(kind, path, read_text(path))


def _python_files(folders: list[Path]) -> Iterator[Path]:
    """Modules that people read; tests and generated tables are left out."""
    dull = {"test", "tests", "testing", "site-packages", "dist-packages", "encodings", "pydoc_data"}
    for folder in folders:
        for path in walk(folder):
            if path.suffix == ".py" and not dull & set(path.relative_to(folder).parts[:-1]):
                yield path


def walk(folder: Path) -> Iterator[Path]:
    """Files below `folder` in the order of their names; links and hidden folders are left out."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.is_symlink() or entry.name.startswith((".", "__pycache__")):
            continue
        if entry.is_dir():
            yield from walk(entry)
        elif entry.is_file():
            yield entry


def _stem_suffix(path: Path) -> str:
    """The suffix below a compression: README.txt.gz is .txt, words.dict.dz is .dict."""
    suffixes = path.suffixes
    if len(suffixes) > 1 and suffixes[-1] in (".gz", ".dz"):
        return suffixes[-2].lower()
    return path.suffix.lower()


def _is_prose_name(path: Path) -> bool:
    return path.suffix != ".py" and path.name.lower().startswith(_PROSE_NAMES)


def _path(name: str) -> Path:
    return Path(sysconfig.get_paths()[name])


def site_packages() -> list[Path]:
    return sorted({_path("purelib"), _path("platlib")})


def _take_turns(streams: list[Iterator[Document]]) -> Iterator[Document]:
    """From each stream in turn, weighed by length: after any time all have given about the same."""
    given = [0] * len(streams)
    alive = set(range(len(streams)))
    while alive:
        i = min(alive, key=lambda j: (given[j], j))
        document = next(streams[i], None)
        if document is None:
            alive.remove(i)
            continue
        given[i] += len(document.text)
        yield document
