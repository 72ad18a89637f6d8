"""A run from its configuration to its pictures, or onward from where it stopped."""

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ..errors import bad_argument
from . import checkpoint, parallel, plots, progress, runlog, summary
from . import corpus as corpora
from .config import TrainConfig
from .loop import Trainer
from .presets import preset

# What may change when a run continues. Anything else would make it another run, or is part of the
# optimizer's state (weight_decay, beta1, beta2) and comes from the checkpoint.
_CHANGEABLE = {
    "steps", "learning_rate", "final_learning_rate_ratio", "warmup_steps", "gradient_clip",
    "log_every", "validate_every", "checkpoint_every", "keep", "tensorboard", "device",
    "expert_parallel",
}  # fmt: skip
# What leaves the goal of a preset meaningful.
_HARMLESS = {"device", "tensorboard", "log_every", "validate_every", "checkpoint_every", "keep"}


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonicmoe"


def default_preset() -> str:
    """`small` where there is a GPU, `demo` elsewhere."""
    return "small" if torch.cuda.is_available() else "demo"


def configure(preset_name: str | None, overrides: dict[str, Any]) -> TrainConfig:
    """A preset with changes. A changed run has no goal unless it states one."""
    wants_cpu = overrides.get("device") == "cpu"
    base = preset(preset_name or ("demo" if wants_cpu else default_preset()))
    if set(overrides) - _HARMLESS:
        overrides = {"target_loss": None, **overrides}
    return base.override(overrides)


def train(
    config: TrainConfig,
    folder: Path,
    cache: Path,
    resume: bool = False,
    picture: bool = True,
    numbered: bool = False,
) -> dict[str, Any]:
    """Train in `folder` and return the numbers of the summary, with `folder` and `finished`.

    With `numbered`, a new run whose folder is taken goes to folder-2, folder-3 and so on.
    """
    world = parallel.start(config.device)
    display = progress.display(world.first)
    with contextlib.ExitStack() as held:
        held.callback(parallel.stop, world)
        if resume:
            world.from_first(lambda: _lock(folder, held))
        key = _record(folder)["corpus"] if resume else None
        if not world.first:
            world.wait()  # the first rank prepares the text, the others find it in the cache
        corpus = corpora.prepare(config, cache, display.say, key)
        if world.first:
            world.wait()
        if not resume:
            folder = world.from_first(lambda: _new_folder(folder, numbered, held))
        return _train(config, folder, cache, corpus, resume, picture, world, display)


def _train(config, folder, cache, corpus, resume, picture, world, display) -> dict[str, Any]:
    head, line = summary.title(config)
    display.say(f"{head}\n  {line}\n  in {folder}")
    trainer = Trainer(config, folder, corpus, world, display, resume)
    if world.first:  # not before the trainer has accepted the configuration
        shutil.copy(corpus.tokenizer_path, folder / "tokenizer.json")
        _write_record(folder, config, corpus.key, cache)
    if resume:
        display.say(f"Continuing after step {trainer.step}.")
    finished = trainer.train()
    numbers = summary.summarise(trainer) | {
        "finished": finished,
        "rank": world.rank,
        "folder": str(folder),
    }
    if world.first:
        summary.write(folder, numbers)
        if picture and plots.available():
            plots.loss_curve(
                folder / "loss.png", runlog.read(folder), head, line.replace("; ", "\n", 1),
                config.model.vocab_size, config.target_loss,
            )  # fmt: skip
        elif picture:
            display.say("No picture: pip install matplotlib draws loss.png.")
    return numbers


def load_config(folder: Path) -> TrainConfig:
    """The configuration of an earlier run."""
    return TrainConfig.from_dict(_record(folder)["config"])


def cache_of(folder: Path) -> Path:
    """Where an earlier run kept its tokenised text, if that folder still exists."""
    path = Path(_record(folder).get("cache", ""))
    return path if path.is_absolute() and path.is_dir() else default_cache()


def _record(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    if not path.is_file():
        raise bad_argument(
            "run", "the folder of an earlier run", repr(str(folder)), "Look below runs/."
        )
    with contextlib.suppress(ValueError):
        record = json.loads(path.read_bytes())
        if isinstance(record, dict) and {"config", "corpus"} <= record.keys():
            return record
    raise bad_argument(
        "run", "a run.json with a configuration", str(path), "The file is damaged: restore it."
    )


def continued(folder: Path, overrides: dict[str, Any]) -> TrainConfig:
    """The configuration of an earlier run with what may change changed."""
    fixed = sorted(set(overrides) - _CHANGEABLE)
    if fixed:
        raise bad_argument(
            "--resume", f"no change but of {', '.join(sorted(_CHANGEABLE))}", ", ".join(fixed),
            "Start a new run for other settings.",
        )  # fmt: skip
    return load_config(folder).override(overrides)


def fresh_folder(runs: Path, name: str) -> Path:
    """Create runs/name, or runs/name-2, … if it is taken. No two processes get the same one."""
    folder, number = runs / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = runs / f"{name}-{number}"


def _new_folder(folder: Path, numbered: bool, held: contextlib.ExitStack) -> Path:
    """Create and lock the folder of a new run."""
    if numbered:
        folder = fresh_folder(folder.parent, folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    _lock(folder, held)
    if checkpoint.steps(folder / "checkpoints"):
        raise bad_argument(
            "folder", "one without checkpoints for a new run", str(folder),
            "Continue that run with resume, or choose another folder.",
        )  # fmt: skip
    return folder


def _lock(folder: Path, held: contextlib.ExitStack) -> None:
    """Keep other trainings out of `folder` until `held` is closed or this process ends."""
    file = held.enter_context(open(folder / ".lock", "a"))  # noqa: SIM115 closed by `held`
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise bad_argument(
            "run", "a folder in which no other process trains", str(folder),
            "Wait for the other training or stop it.",
        ) from None  # fmt: skip
    except OSError as error:  # some network file systems have no locks
        print(f"{folder} is not locked ({error.strerror}): do not train in it twice at a time.")


def _write_record(folder: Path, config: TrainConfig, corpus: str, cache: Path) -> None:
    path = folder / "run.json"
    fresh = path.with_suffix(".new")
    record = {"config": config.to_dict(), "corpus": corpus, "cache": str(cache.resolve())}
    fresh.write_text(json.dumps(record, indent=1))
    fresh.replace(path)
