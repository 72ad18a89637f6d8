"""Optional packages: imported where they are used, with a remedy where they are missing."""

import importlib
from types import ModuleType


class MissingExtra(ImportError):
    """An optional package is needed and not installed; the message is the pip command."""


def need(module: str, purpose: str) -> ModuleType:
    """Import `module`, or say what it is for and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingExtra(
            f"{purpose} needs the package {package!r}. Install it: pip install {package}"
        ) from error


def have(module: str) -> ModuleType | None:
    """Import `module` if it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
