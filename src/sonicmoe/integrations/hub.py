"""Hugging Face `kernels`: write this package as a build that its loader accepts offline.

python -m sonicmoe.integrations.hub FOLDER

The loader imports a build under the id in its metadata. Ours ends in a hash of the files, and the
operators are registered under the same name, so different builds run side by side in one process.
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

from ..errors import bad_argument

VARIANT = "torch-universal"  # pure Python and Triton: any device, any version of PyTorch
NOT_SHIPPED = {"bench", "train", "cli.py", "doctor.py", "__main__.py"}  # the command line
_PACKAGE = Path(__file__).parents[1]


def build(folder: str | Path) -> str:
    """Write `folder`/build/torch-universal, for `kernels.get_local_kernel`; returns its id."""
    target = Path(folder) / "build" / VARIANT
    if target.exists():
        raise bad_argument(
            "folder", f"one without build/{VARIANT}", str(folder), "Delete that build first."
        )
    files = _files()
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.as_posix()}\0".encode())
        digest.update(hashlib.sha256((_PACKAGE / path).read_bytes()).digest())
    identity = f"sonicmoe_{digest.hexdigest()[:12]}"
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_PACKAGE / path, target / path)
    metadata = {
        "id": identity,
        "name": "sonicmoe",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],  # the loader allows a fixed list, without torch and Triton
        "backend": {"type": "cuda"},  # required; the name of the variant decides where it loads
    }
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return identity


def _files() -> list[Path]:
    """The files of a build, relative to the package, in a fixed order."""
    found = [path.relative_to(_PACKAGE) for path in _PACKAGE.rglob("*.py")]
    return sorted(path for path in found if path.parts[0] not in NOT_SHIPPED)


def main(argv: list[str] | None = None) -> None:
    """Write a build into the folder that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m sonicmoe.integrations.hub",
        description="Write this package as a build for the Hugging Face kernels loader.",
    )
    parser.add_argument("folder", help="where to write build/torch-universal")
    try:
        print(build(parser.parse_args(argv).folder))
    except (ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
