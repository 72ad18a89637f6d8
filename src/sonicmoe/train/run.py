"""A run from its configuration to its pictures, or onward from where it stopped."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ..errors import bad_argument
from . import corpus as corpora
from . import parallel, plots, progress, runlog, summary
from .config import TrainConfig
from .loop import Trainer
from .presets import preset

# What may change when a run continues. Anything else would make it another run.
_CHANGEABLE = {"steps", "warmup_steps", "log_every", "validate_every", "checkpoint_every", "keep",
               "tensorboard", "device", "expert_parallel"}  # fmt: skip
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
    config: TrainConfig, folder: Path, cache: Path, resume: bool = False, picture: bool = True
) -> dict[str, Any]:
    """Train in `folder`; the numbers of the summary, and whether it `finished`."""
    world = parallel.start(config.device)
    display = progress.display(world.first)
    try:
        return _train(config, folder, cache, resume, picture, world, display)
    finally:
        parallel.stop(world)


def _train(config, folder, cache, resume, picture, world, display) -> dict[str, Any]:
    key = json.loads((folder / "run.json").read_text())["corpus"] if resume else None
    if not world.first:
        world.wait()  # the first rank prepares the text, the others find it in the cache
    corpus = corpora.prepare(config, cache, display.say, key)
    if world.first:
        world.wait()
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(corpus.tokenizer_path, folder / "tokenizer.json")
        _write_config(folder, config, corpus.key)
    head, line = summary.title(config)
    display.say(f"{head}\n  {line}\n  in {folder}")
    trainer = Trainer(config, folder, corpus, world, display, resume)
    if resume:
        display.say(f"Continuing after step {trainer.step}.")
    finished = trainer.train()
    numbers = summary.summarise(trainer) | {"finished": finished, "rank": world.rank}
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
    path = folder / "run.json"
    if not path.is_file():
        raise bad_argument(
            "run", "the folder of an earlier run", repr(str(folder)), "Look below runs/."
        )
    return TrainConfig.from_dict(json.loads(path.read_text())["config"])


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
    """runs/name, or runs/name-2, … if it is taken."""
    folder, number = runs / name, 1
    while folder.exists():
        number += 1
        folder = runs / f"{name}-{number}"
    return folder


def _write_config(folder: Path, config: TrainConfig, corpus: str) -> None:
    path = folder / "run.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"config": config.to_dict(), "corpus": corpus}, indent=1))
    fresh.replace(path)
