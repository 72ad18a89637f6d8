"""Hugging Face `kernels`: write this package as a kernel that its loader accepts offline.

python -m sonicmoe.integrations.hub FOLDER

The loader imports a build under the id in its metadata. Ours ends in a hash of the files, and the
operators are registered under the same name, so different builds run side by side in one process.
"""

import argparse
import hashlib
import json
from base64 import b64encode
from pathlib import Path

from ..errors import bad_argument

# Python and Triton, the same files for both: a GPU from sm_80 on, or none.
VARIANTS = {
    "torch-cuda": {"type": "cuda", "archs": ["8.0+PTX"]},
    "torch-cpu": {"type": "cpu"},
}
_PACKAGE = Path(__file__).parents[1]


def build(folder: str | Path) -> str:
    """Write `folder`/build/torch-cuda and torch-cpu, for `kernels`; returns the id of both."""
    build = Path(folder) / "build"
    for variant in VARIANTS:
        if (build / variant).exists():
            raise bad_argument(
                "folder", f"one without build/{variant}", str(folder), "Delete that build first."
            )
    files = {path.relative_to(_PACKAGE): path.read_bytes() for path in _PACKAGE.rglob("*.py")}
    digests = {path.as_posix(): hashlib.sha256(files[path]).digest() for path in sorted(files)}
    whole = hashlib.sha256(b"".join(f"{path}\0".encode() + d for path, d in digests.items()))
    identity = f"sonicmoe_{whole.hexdigest()[:12]}"
    for variant, backend in VARIANTS.items():
        for path, content in files.items():
            (build / variant / path).parent.mkdir(parents=True, exist_ok=True)
            (build / variant / path).write_bytes(content)
        metadata = {
            "id": identity,
            "name": "sonicmoe",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],  # the loader allows a fixed list, without torch and Triton
            "backend": backend,
            "digest": {
                "algorithm": "sha256",
                "files": {path: b64encode(d).decode() for path, d in digests.items()},
            },
        }
        (build / variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return identity


def main(argv: list[str] | None = None) -> None:
    """Write a build into the folder that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m sonicmoe.integrations.hub",
        description="Write this package as a build for the Hugging Face kernels loader.",
    )
    parser.add_argument("folder", help="where to write build/torch-cuda and build/torch-cpu")
    try:
        print(build(parser.parse_args(argv).folder))
    except (ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
