"""Loads a build for the Hugging Face `kernels` loader where that is not installed."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType


def load(folder: Path) -> ModuleType:
    """Import a build as the loader does: under the id in its metadata."""
    variant = folder / "build" / "torch-cpu"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
