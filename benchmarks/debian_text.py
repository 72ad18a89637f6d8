"""English text from Debian's archive, for trainings without a dataset at hand.

python benchmarks/debian_text.py english        112 MB in a minute; needs apt-get and dpkg-deb
sonicmoe train --data english
"""

import gzip
import html
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# Webster's dictionary, a dictionary of computing, a long FAQ and four manuals.
PACKAGES = (
    "dict-gcide", "dict-foldoc", "anarchism", "linux-doc-6.1", "perl-doc", "postgresql-doc-15",
    "python3.11-doc",
)  # fmt: skip
PROSE = (".txt", ".rst", ".pod", ".html", ".dict", ".md")
MARKUP = re.compile(r"<(script|style).*?</\1>|<[^>]+>", re.DOTALL)
LONGEST = 100_000  # characters of a document: what is longer is cut, so that parts can be held out


def unpacked(package: str, folder: Path) -> Path:
    subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
    (archive,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, folder / package], check=True)
    return folder / package


def texts(folder: Path) -> list[tuple[str, str]]:
    """Name and text of every file that is prose; web pages only where there is nothing better."""
    found: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
    for file in sorted(folder.rglob("*")):
        name = file.name.removesuffix(".gz").removesuffix(".dz")
        if not name.endswith(PROSE) or file.is_symlink() or not file.is_file():
            continue
        data = file.read_bytes()
        text = (data if name == file.name else gzip.decompress(data)).decode(errors="ignore")
        marked_up = name.endswith(".html")
        if marked_up:
            text = html.unescape(MARKUP.sub("", text))
        text = re.sub(r"\n{3,}", "\n\n", text)
        found[marked_up].append(("_".join(file.relative_to(folder).parts), text))
    # Manuals often come twice; a few readmes beside the pages are not the manual.
    plain = sum(len(text) for _, text in found[False])
    return found[plain < 1_000_000]


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    target, seen = Path(sys.argv[1]), set()
    for package in PACKAGES:
        size = 0
        with tempfile.TemporaryDirectory() as work:
            for name, text in texts(unpacked(package, Path(work))):
                if len(text) < 400 or text in seen:
                    continue
                seen.add(text)
                (target / package).mkdir(parents=True, exist_ok=True)
                for start in range(0, len(text), LONGEST):
                    path = target / package / f"{name}-{start // LONGEST}.txt"
                    path.write_text(text[start : start + LONGEST])
                size += len(text)
        print(f"{size / 1e6:6.1f} MB  {package}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
