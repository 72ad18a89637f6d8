"""Records of measurements: where they were made, written as JSON lines, read back."""

import datetime
import json
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

import sonicmoe
from sonicmoe.tools.verify_run import device_name as device_name
from sonicmoe.tuning import Target
from sonicmoe.tuning.table import tuned

Record = dict

RESULTS = Path("benchmarks/results")
# Options left out of a recorded command: paths of one machine, and the commit.
_NOT_RECORDED = re.compile(r" --(results|output|out|commit)[ =]\S+")
_PEERS = re.compile(r" (--(sonicmoe|peers)-path)[ =]\S+")


def provenance(device: str | torch.device, command: str, commit: str | None = None) -> Record:
    """Everything needed to judge a measurement or to repeat it."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "sonicmoe": sonicmoe.__version__,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit or _commit(),
        "tuned": tuned_entries(device),
        "command": _PEERS.sub(r" \1 FOLDER", _NOT_RECORDED.sub("", command)),
    }


def tuned_entries(device: str | torch.device) -> int:
    """How many configurations come from a table of `sonicmoe tune` on this machine."""
    if torch.device(device).type != "cuda":
        return 0
    p = torch.cuda.get_device_properties(device)
    table = tuned(Target(10 * p.major + p.minor, p.multi_processor_count))
    return len(table.rows) + len(table.weights)


def write(records: Iterable[Record], folder: Path, label: str) -> Path | None:
    """Append to `<folder>/<device>/<date>-<label>.jsonl`; no records, no file."""
    records = list(records)
    if not records:
        return None
    first = records[0]
    path = folder / slug(first["device"]) / f"{first['date'][:10]}-{slug(label)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(_rounded(record)) + "\n" for record in records)
    return path


def read(folder: Path) -> list[Record]:
    """Every kept record, oldest first, with today's names of its fields."""
    lines = (
        line for path in sorted(folder.glob("**/*.jsonl")) for line in path.read_text().splitlines()
    )
    records = (_renamed(json.loads(line)) for line in lines if line)
    return sorted(records, key=lambda record: record["date"])


def _renamed(record: Record) -> Record:
    """Until 2026-11-17 "candidate" was called "subject", and "modes" were called "ways"."""
    if "subject" in record:
        name = record.pop("subject")
        record["candidate"] = "modes" if name == "ways" else name
    return record


def slug(text: str) -> str:
    """Lower-case letters, digits, points and dashes: the name of a file or folder."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _rounded(value):
    """Round to five significant digits: timing resolves fewer."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _commit() -> str | None:
    """The commit of the source, with a + if files differ from it."""

    def git(*arguments: str) -> str:
        source = Path(sonicmoe.__file__).parent
        return subprocess.run(
            ["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "-s", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
