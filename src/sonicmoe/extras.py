"""Imports of optional packages; the error for a missing one says how to install it."""

import importlib
import re
from types import ModuleType


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
    wanted = requirement(package)
    return MissingExtra(f"{purpose} needs {wanted}. Install it: pip install '{wanted}'")


def requirement(package: str) -> str:
    """`package` with the oldest version that the extras of this package accept, if they name it."""
    import importlib.metadata  # takes 20 ms; only errors need it

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
