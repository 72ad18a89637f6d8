"""Whether the files of this package are whole, which importing it checks; its documentation."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


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
