"""Optional packages: imported where they are used, with a remedy where they are missing."""

import importlib
import re
from types import ModuleType


class MissingExtra(ImportError):
    """An optional package is needed and not installed; the message is the pip command."""


def need(module: str, purpose: str) -> ModuleType:
    """Import `module`, or say what it is for and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(module.split(".")[0], purpose) from error


def missing(package: str, purpose: str) -> MissingExtra:
    """The error for a package that is absent or too old; returned, to be raised by the caller."""
    wanted = requirement(package)
    return MissingExtra(f"{purpose} needs {wanted}. Install it: pip install '{wanted}'")


def requirement(package: str) -> str:
    """`package` with the oldest version that the extras of this package accept, if they name it."""
    import importlib.metadata  # 20 ms that only an error needs

    try:
        declared = importlib.metadata.requires("sonicmoe") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree that was not installed
        declared = []
    named = (found[0] for line in declared if (found := re.match(r"[\w.-]+(>=[\w.]+)?", line)))
    return next((r for r in named if r.partition(">=")[0] == package), package)


def have(module: str) -> ModuleType | None:
    """Import `module` if it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
