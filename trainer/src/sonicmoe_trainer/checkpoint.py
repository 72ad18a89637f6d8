"""Checkpoints with checksums, written atomically.

A checkpoint is a folder step-00001234 with state.pt and manifest.json, which holds the size and
SHA-256 of state.pt and a checksum of its own. It is written under another name, flushed to the disk
and renamed: a kill at any moment leaves the earlier ones as they were. A damaged checkpoint is
never loaded, and never counts among those that are kept.
"""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from sonicmoe.plugins import bad_argument

from .parallel import World

_PREFIX = "step-"
_UNFINISHED = ".writing-"
_STATE, _MANIFEST = "state.pt", "manifest.json"
# Checkpoints that this process wrote or verified, with the stamps of their files at that time, so
# that pruning does not read gigabytes again.
_verified: dict[Path, list[tuple[int, int]] | None] = {}


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write `state` as the checkpoint of `step`, then remove all but the newest `keep` sound ones.

    Raises an OSError if that fails, on a full disk for example; earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_by_a_kill in folder.glob(f"{_UNFINISHED}*"):
        _remove(left_by_a_kill)
    final = _path(folder, step)
    work = folder / f"{_UNFINISHED}{final.name}"
    try:
        _write(work, state)
        _remove(final)
        os.rename(work, final)
        _flush(folder)
    except OSError as error:
        raise OSError(
            error.errno,
            f"The checkpoint of step {step} could not be written: {error.strerror or error}. "
            "Earlier checkpoints are intact",
            str(final),
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _verified[final] = _stamp(final)
    _prune(folder, step, keep)
    return final


def _write(work: Path, state: dict[str, Any]) -> None:
    work.mkdir()
    with open(work / _STATE, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch.save hides a full disk behind its own error
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    (work / _MANIFEST).write_bytes(_manifest({_STATE: _describe(work / _STATE)}))
    for path in (work / _STATE, work / _MANIFEST, work):
        _flush(path)


def _prune(folder: Path, newest: int, keep: int) -> None:
    """Remove what is older than the `keep` newest sound checkpoints up to step `newest`.

    Later ones do not count: the run continued from an earlier step, so they could not be loaded.
    """
    sound = 0
    for step in reversed(steps(folder)):
        path = _path(folder, step)
        if sound >= keep:
            _remove(path)
        elif step <= newest and _is_sound(path):
            sound += 1


def _is_sound(path: Path) -> bool:
    stamp = _stamp(path)
    return stamp is not None and (stamp == _verified.get(path) or _fault(path) is None)


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, sound or not, ascending."""
    names = (p.name.removeprefix(_PREFIX) for p in folder.glob(f"{_PREFIX}*") if p.is_dir())
    # step-5 is not one of ours: it would be step-00000005.
    return sorted(int(n) for n in names if n.isdecimal() and n == f"{int(n):08d}")


def latest_sound(folder: Path) -> int | None:
    """The step that `load_latest` would load."""
    return next((s for s in reversed(steps(folder)) if _is_sound(_path(folder, s))), None)


def set_aside(folder: Path, step: int) -> None:
    """Rename the checkpoint of `step`, if there is one, so that no run continues from it."""
    path = _path(folder, step)
    if path.is_dir():
        aside = path.with_name(f"refused-{path.name}")
        _remove(aside)
        os.rename(path, aside)


def load_latest(
    folder: Path, say: Callable[[str], None] = print, device: str | torch.device = "cpu"
) -> dict[str, Any]:
    """The state of the newest sound checkpoint. Damaged ones are reported through `say`."""
    damaged: list[str] = []
    for step in reversed(steps(folder)):
        path = _path(folder, step)
        fault = _fault(path)
        if fault is None:
            try:
                state = torch.load(path / _STATE, map_location=device, weights_only=True, mmap=True)
            except pickle.UnpicklingError:
                fault = f"{_STATE} holds Python objects, which are not loaded: they can run code"
            else:
                for message in damaged:
                    say(f"{message}, falling back to step {step}.")
                return state
        damaged.append(f"Checkpoint {path} is damaged: {fault}")
    got, remedy = "; ".join(damaged) or "none", "Check the path, or start a new run."
    raise bad_argument("checkpoint", f"a sound checkpoint in {folder}", got, remedy)


def _path(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step:08d}"


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is as it was written."""
    try:
        found = (path / _MANIFEST).read_bytes()
        files = json.loads(found)["files"]
        # Byte for byte: a change that JSON would not notice is damage too.
        if found != _manifest(files) or files.keys() != {_STATE}:
            return f"{_MANIFEST} is not as it was written"
    except OSError as error:
        return f"{_MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{_MANIFEST} is not as it was written"
    try:
        if files[_STATE] != _describe(path / _STATE):
            return f"{_STATE} does not have the size and checksum it was written with"
    except OSError as error:
        return f"{_STATE} cannot be read ({error.strerror})"
    _verified[path] = _stamp(path)
    return None


def _manifest(files: Any) -> bytes:
    """The content of manifest.json: the files, and a checksum of this list itself."""
    own = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": own}).encode()


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _stamp(path: Path) -> list[tuple[int, int]] | None:
    """Size and time of change of the files of a checkpoint; None if one is missing."""
    try:
        found = [(path / name).stat() for name in (_STATE, _MANIFEST)]
    except OSError:
        return None
    return [(f.st_size, f.st_mtime_ns) for f in found]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_not_finite(state: dict[str, Any]) -> str | None:
    """The name of a tensor of the model or the optimizer that holds an infinity or a NaN."""
    tensors = dict(state["model"])
    for name, moments in state["optimizer"]["state"].items():
        tensors |= {f"{kind} of {name}": value for kind, value in moments.items()}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor) and not value.isfinite().all():
            return name
    return None


def gather(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """Weights, optimizer and the state of the random numbers.

    Not sharded, so that a run may continue on another number of ranks.
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
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **states, options=StateDictOptions(full_state_dict=True))
    torch.set_rng_state(state["rng"].cpu())
    if world.device.type == "cuda" and "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"].cpu(), world.device)


def restore_weights(state: dict[str, Any], model: nn.Module) -> None:
    """Load only the weights. Raises a ValueError if their names differ from those of `model`."""
    # PyTorch silently keeps the random weights of names that a full state dict lacks.
    if different := sorted(model.state_dict().keys() ^ state["model"].keys()):
        expected, remedy = "a run with the same weights", "Keep the router of that run."
        got = f"{len(different)} that only one of them has, for example {different[0]}"
        raise bad_argument("init_from", expected, got, remedy)
    set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict=True))
