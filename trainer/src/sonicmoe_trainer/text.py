"""Sources of text: this installation, files and folders, or a Hugging Face dataset.

Every source is a stream of `Document`s in an order that depends only on file names, so that two
runs on one machine see the same text. Files are read in pieces: memory depends neither on their
size nor on what they unpack to.
"""

import codecs
import gzip
import inspect
import io
import itertools
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sonicmoe.plugins import bad_argument, need

_PROSE = {".txt", ".md", ".rst", ".text", ".tex", ".org", ".adoc", ".pod"}
_LEGAL = ("license", "licence", "copying", "notice", "copyright", "authors")
_PROSE_NAMES = (*_LEGAL, "readme", "news", "metadata", "contributing", "howto", "faq")
_CODE = {".py", ".pyi", ".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}
_CODE |= {".js", ".ts", ".rs", ".go", ".java"}
_DOCSTRING = re.compile(
    r"""(?:\A(?:\s*\#[^\n]*\n|\s)*|:[ \t]*\n\s*)[rR]?"""
    r"""(?P<quote>\"{3}|'{3})(?P<text>.*?)(?P=quote)""",
    re.S,
)
LARGEST_UNPACKED = 4 * 2**30  # bytes of one gzip file; presets take at most 2 GB in all
_LONGEST_DOCUMENT = 64 * 2**20  # characters; a longer file is cut into sections
_SECTION = 16384  # characters
_LONGEST_SECTION = 2**20  # characters; a paragraph that goes on for longer is cut at a line end
_SECTIONS = 20  # that a short file is cut into, so that one can be held out
_SHORTEST_SECTION = 1024  # characters
_PIECE = 2**20  # bytes read at a time
_SHORTEST = 200  # characters; shorter documents are left out


class NotText(ValueError):
    """The file is not UTF-8 text."""


@dataclass(frozen=True, slots=True)
class Document:
    kind: str
    name: str
    text: str


def documents(
    sources: Iterable[str], include_code: bool, not_text: list[str] | None = None
) -> Iterator[Document]:
    """The documents of every source in `sources`, one source after the other.

    Files of a folder that are not UTF-8 text are left out; their names are added to `not_text`.
    """
    for source in sources:
        check(source)
        if source == "local":
            yield from installation(include_code)
        elif Path(source).expanduser().exists():
            yield from files(Path(source).expanduser(), not_text)
        else:
            yield from dataset(source)


def check(source: str) -> None:
    """Raise a ValueError if there is no such source; datasets are only looked up when read."""
    if source == "local" or (source and Path(source).expanduser().exists()):
        return
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        expected = "'local', a file, a folder or a dataset name owner/name"
        raise bad_argument("data", expected, repr(source), "Check the path.")
    need("datasets", f"data={source} (no file of that name exists)")


def installation(include_code: bool) -> Iterator[Document]:
    """Documents of every kind, interleaved, so that a small budget gets a mixture."""
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


def files(path: Path, not_text: list[str] | None = None) -> Iterator[Document]:
    """A file as sections, so that some can be held out; a folder as one document for each file
    below it that looks like text or source by its name.

    Raises ValueError for a file that cannot be read or unpacked.
    """
    if path.is_file():
        yield from _read_documents("files", path, alone=True)
        return
    for file in walk(path):
        if _stem_suffix(file) in _PROSE | _CODE or _is_prose_name(file):
            found = _read_documents("files", file)
            try:
                first = list(itertools.islice(found, 1))
            except NotText:
                if not_text is not None:
                    not_text.append(str(file))
                continue
            yield from first
            yield from found


def dataset(name: str) -> Iterator[Document]:
    """`owner/name` or `owner/name:configuration`, streamed; the column `text` is read."""
    for i, row in enumerate(_rows(name)):
        if "text" not in row:
            got = f"{name} with {', '.join(row)}"
            remedy = "Save the column you want as text files and pass the folder."
            raise bad_argument("data", "a dataset with a column named text", got, remedy)
        text = io.IncrementalNewlineDecoder(None, translate=True).decode(row["text"], final=True)
        yield from _document("dataset", f"{name}#{i}", text)


def _rows(name: str) -> Iterator[dict[str, str]]:
    """Rows of a dataset. Whatever the library, hub or network raises becomes a ValueError."""
    library = need("datasets", f"data={name}")
    path, _, configuration = name.partition(":")
    try:
        yield from library.load_dataset(path, configuration or None, split="train", streaming=True)
    except Exception as error:
        got = f"{name} ({' '.join(str(error).split()) or type(error).__name__})"
        remedy = "Check the name and the network, or pass text files."
        raise bad_argument("data", "a dataset that can be loaded", got, remedy) from error


def read_pieces(path: Path) -> Iterator[str]:
    """The text of a file in pieces, unpacked if it is gzip or dictzip, with \\n as line end.

    Raises ValueError, possibly after the first pieces, if the file cannot be read, is a damaged or
    too large gzip, or (`NotText`) is not UTF-8.
    """
    text = codecs.getincrementaldecoder("utf-8")()
    decoder = io.IncrementalNewlineDecoder(text, translate=True)
    size = 0
    try:
        with open(path, "rb") as packed:
            is_gzip = packed.peek(2)[:2] == b"\x1f\x8b"
            file = gzip.GzipFile(fileobj=packed) if is_gzip else packed
            while data := file.read(_PIECE):
                if size == 0 and b"\0" in data[:4096]:
                    raise _not_text(path)
                size += len(data)
                if is_gzip and size > LARGEST_UNPACKED:
                    most = f"gzip files that unpack to at most {LARGEST_UNPACKED:,} bytes"
                    remedy = "If it is meant to be that long, unpack it with gunzip."
                    raise bad_argument("data", most, f"{path}, which unpacks to more", remedy)
                yield decoder.decode(data)
            yield decoder.decode(b"", final=True)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        got, remedy = f"{path}, which is damaged or cut short ({error})", "Fetch it again."
        raise bad_argument("data", "sound gzip files", got, remedy) from error
    except OSError as error:
        raise bad_argument(
            "data", "files that can be read", f"{path} ({error.strerror})", "Check its permissions."
        ) from error
    except UnicodeDecodeError as error:
        raise _not_text(path) from error


def _not_text(path: Path) -> NotText:
    message = bad_argument("data", "UTF-8 text", f"{path}, which is not", "Convert or remove it.")
    return NotText(*message.args)


def _read_documents(kind: str, path: Path, alone: bool = False) -> Iterator[Document]:
    """A file as one document; a very long one, or one that is `alone`, as sections."""
    most = _SECTIONS * _SECTION if alone else _LONGEST_DOCUMENT
    pieces = read_pieces(path)
    head, length = [], 0
    for piece in pieces:
        head.append(piece)
        length += len(piece)
        if length > most:
            sections = _sections(itertools.chain(head, pieces))
            break
    else:
        if not alone:
            yield from _document(kind, path, "".join(head))
            return
        size = max(_SHORTEST_SECTION, length // _SECTIONS)
        sections = _sections(head, size, 2 * size)
    for i, section in enumerate(sections):
        yield from _document(kind, f"{path}#{i}", section)


def _read_installed(path: Path) -> str | None:
    """The text of a file of this machine; None if it is unreadable, damaged, not text or longer
    than a document may be."""
    try:
        found = list(itertools.islice(_read_documents("", path), 2))
    except ValueError:
        return None
    return found[0].text if len(found) == 1 else None


def docstrings(source: str) -> str:
    """The docstrings of a module, its classes and its functions, in their order, dedented.

    By pattern: a string in triple quotes at the start of the file or of an indented block. Parsing
    would be exact but takes thirty times as long.
    """
    return "\n\n".join(inspect.cleandoc(m["text"]) for m in _DOCSTRING.finditer(source))


def _document(kind: str, path: Path | str, text: str | None) -> Iterator[Document]:
    if text is not None and len(text) >= _SHORTEST:
        yield Document(kind, str(path), text)


def _sections(pieces: Iterable[str], size: int = 0, longest: int = 0) -> Iterator[str]:
    """The text cut at the first paragraph end after every `size` characters.

    Where there is none in `longest`, at the last line end within, or else right there.
    """
    size, longest = size or _SECTION, longest or _LONGEST_SECTION
    rest = ""
    for piece in pieces:
        rest += piece
        start = 0
        while True:
            limit = start + longest
            end, gap = rest.find("\n\n", start + size, limit), 2
            if end < 0 and len(rest) >= limit:
                end, gap = rest.rfind("\n", start + size, limit), 1
                if end < 0:
                    end, gap = limit, 0
            if end < 0:
                break
            yield rest[start:end]
            start = end + gap
        rest = rest[start:]
    yield rest


def _prose_files(kind: str, folders: list[Path], packed: bool = False) -> Iterator[Document]:
    for path in itertools.chain.from_iterable(map(walk, folders)):
        suffix = _stem_suffix(path)
        if "changelog" in path.name.lower() or path.name.endswith("requirements.txt"):
            continue
        if suffix in _PROSE or _is_prose_name(path) or (packed and suffix in (".gz", ".dict")):
            yield from _document(kind, path, _read_installed(path))


def _docstrings(kind: str, folders: list[Path]) -> Iterator[Document]:
    for path in _python_files(folders):
        yield from _document(kind, path, docstrings(_read_installed(path) or ""))


def _sources(kind: str, folders: list[Path]) -> Iterator[Document]:
    for path in _python_files(folders):
        yield from _document(kind, path, _read_installed(path))


def _python_files(folders: list[Path]) -> Iterator[Path]:
    """Python files without tests and generated tables."""
    omit = {"test", "tests", "testing", "site-packages", "dist-packages", "encodings", "pydoc_data"}
    for folder in folders:
        for path in walk(folder):
            if path.suffix == ".py" and not omit & set(path.relative_to(folder).parts[:-1]):
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
    """Interleave streams so that each has contributed about as many characters at any time."""
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
