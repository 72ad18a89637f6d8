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
    wanted, extra = requirement(package)
    return MissingExtra(f"{purpose} needs {wanted}. Install it: {install(extra or wanted)}")


def install(package: str) -> str:
    """The command that installs a package, a requirement or an extra such as sonicmoe[train]."""
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
    return needs, f"sonicmoe[{ours[0]}]" if ours else None  # train rather than bench


def have(module: str) -> ModuleType | None:
    """Import `module` if it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
