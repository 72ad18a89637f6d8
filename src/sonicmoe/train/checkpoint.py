"""Checkpoints that can be trusted.

A checkpoint is a folder step-00001234 with state.pt and manifest.json, which holds the size and CRC
of every file. It is written under another name, flushed to the disk and renamed: a kill at any
moment leaves the earlier ones as they were. Loading skips, with a message, what is damaged.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from ..errors import bad_argument
from .parallel import World

_PREFIX = "step-"
_UNFINISHED = ".writing-"


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write `state` as the checkpoint of `step`, then remove all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{_PREFIX}{step:08d}"
    work, final = folder / f"{_UNFINISHED}{name}", folder / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    torch.save(state, work / "state.pt")
    manifest = {p.name: {"bytes": p.stat().st_size, "crc32": _crc(p)} for p in work.iterdir()}
    (work / "manifest.json").write_text(json.dumps(manifest))
    for path in (*work.iterdir(), work):
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(work, final)
    _flush(folder)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / f"{_PREFIX}{old:08d}")
    return final


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending; whether it is sound is not looked at."""
    names = (p.name.removeprefix(_PREFIX) for p in folder.glob(f"{_PREFIX}*"))
    return sorted(int(n) for n in names if n.isdigit())


def load_latest(
    folder: Path, say: Callable[[str], None] = print, device: str | torch.device = "cpu"
) -> dict[str, Any]:
    """The state of the newest sound checkpoint."""
    for step in reversed(steps(folder)):
        path = folder / f"{_PREFIX}{step:08d}"
        fault = _fault(path)
        if fault is None:
            return torch.load(path / "state.pt", map_location=device, weights_only=True, mmap=True)
        say(f"Skipping checkpoint {path}: {fault}.")
    raise bad_argument(
        "checkpoint", f"a sound checkpoint in {folder}", "none",
        "Check the path, or start a new run.",
    )  # fmt: skip


def _fault(path: Path) -> str | None:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError):
        return "its manifest is missing or damaged"
    for name, expected in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
        if _crc(file) != expected["crc32"]:
            return f"{name} does not have the checksum it was written with"
    return None


def _crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def gather(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """Weights, optimizer and the state of the random numbers.

    Whole, whatever the sharding: a run may continue on another number of ranks.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=world.size > 1)
    weights, moments = get_state_dict(model, optimizer, options=options)
    rng = torch.get_rng_state()
    found: dict[str, Any] = {"model": weights, "optimizer": moments, "rng": rng}
    if world.device.type == "cuda":
        found["cuda_rng"] = torch.cuda.get_rng_state(world.device)
    return found


def restore(
    state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """The inverse of `gather`."""
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )  # fmt: skip
    torch.set_rng_state(state["rng"].cpu())
    if world.device.type == "cuda" and "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"].cpu(), world.device)
