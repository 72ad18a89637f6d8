"""Where this package lies, and whether another one with its import name lies in the same folder."""

import importlib.metadata
import json
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def problem() -> str | None:
    """What is wrong with the files of this package, and the cure; None if nothing is.

    `sonic-moe`, the published package, is imported by the same name: each overwrites files of the
    other, and uninstalling one removes files of both.
    """
    again = "pip uninstall -y sonic-moe sonicmoe, then install sonicmoe again."
    try:
        published = importlib.metadata.distribution("sonic-moe")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        if Path(str(published.locate_file("sonicmoe"))).resolve() == PACKAGE:
            together = f"sonic-moe {published.version} and this package, sonicmoe, share the folder"
            return f"{together} {PACKAGE}, so neither works: {again}"
    if not (PACKAGE / "__init__.py").exists():
        return f"Files of {PACKAGE} are missing, as after uninstalling sonic-moe: {again}"
    return None


def documentation() -> str:
    """Folder or address of the documentation; the README, where the wheel names neither."""
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
            return str(about.metadata.get_payload())
    return str(clone / "docs")
