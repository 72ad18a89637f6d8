"""What is installed: our own files, which importing checks, and optional packages."""

import importlib
import re
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent
# The oldest and the newest version that the tests ran with: docs/integrations.md has every row.
TESTED = {
    "Python": ("3.11", "3.12"),
    "torch": ("2.11", "2.13"),
    "Triton": ("3.6", "3.6"),
    "transformers": ("5.10", "5.23"),
}


def tested() -> str:
    """Python 3.11 to 3.13, torch …"""
    spans = {name: " to ".join(dict.fromkeys(span)) for name, span in TESTED.items()}
    return ", ".join(f"{name} {span}" for name, span in spans.items())


# --- optional packages ----------------------------------------------------------------------------
class MissingExtra(ImportError):
    """An optional package is needed and not installed; the message is the pip command."""


def need(module: str, purpose: str) -> ModuleType:
    """Import `module`, or raise `MissingExtra`, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(module.split(".")[0], purpose) from error


def missing(package: str, purpose: str) -> MissingExtra:
    """The error for a package that is missing or too old; the caller raises it."""
    wanted, extra = requirement(package)
    return MissingExtra(f"{purpose} needs {wanted}. Install it: {install(extra or wanted)}")


def install(package: str) -> str:
    """The command that installs a package, a requirement or an extra such as sonicmoe[hf]."""
    return f"pip install '{package}'"


def requirement(package: str) -> tuple[str, str | None]:
    """`package` with the oldest version that works, and the extra of ours that has it, if any."""
    import importlib.metadata  # takes 20 ms; only errors need it

    try:
        declared = importlib.metadata.requires("sonicmoe") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree that was not installed
        declared = []
    line = re.compile(r"""(?P<needs>(?P<name>[\w.-]+)[^;\s]*)\s*;.*extra == ["'](?P<extra>\w+)""")
    found = [m for m in map(line.match, declared) if m and m["name"] == package]
    ours = sorted((m["extra"] for m in found if m["extra"] not in ("test", "dev")), reverse=True)
    needs = found[0]["needs"] if found else package
    return needs, f"sonicmoe[{ours[0]}]" if ours else None


def have(module: str) -> ModuleType | None:
    """Import `module` if it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


# --- our own files --------------------------------------------------------------------------------
def problem() -> str | None:
    """What is wrong with the files of this package, and the cure; None if nothing is.

    `sonic-moe`, the published package, is imported by the same name: each overwrites files of the
    other, and uninstalling one removes files of both. Its `functional` is a folder.
    """
    again = "pip uninstall -y sonic-moe sonicmoe, then install sonicmoe again."
    if (PACKAGE / "functional/__init__.py").exists():
        return f"Files of sonic-moe and of sonicmoe are mixed in {PACKAGE}: {again}"
    if not (PACKAGE / "__init__.py").exists():
        return f"Files of {PACKAGE} are missing, as after uninstalling sonic-moe: {again}"
    return None


def documentation() -> str:
    """Folder or address of the documentation; the README, where the wheel names neither."""
    import importlib.metadata
    import json

    clone = PACKAGE.parents[1]
    if not (clone / "docs/api.md").exists():
        about = importlib.metadata.distribution("sonicmoe")
        for line in about.metadata.get_all("Project-URL") or ():
            name, _, address = line.partition(", ")
            if name == "Documentation":
                return address
        source = json.loads(about.read_text("direct_url.json") or "{}").get("url", "")
        clone = Path(source.removeprefix("file://"))
        if not (clone / "docs/api.md").exists():
            return (about.read_text("METADATA") or "").partition("\n\n")[2]
    return str(clone / "docs")


if (_why := problem()) is not None:
    raise ImportError(_why)
