"""Start or continue a run, from its configuration to its plots."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sonicmoe.plugins import bad_argument, check_writable, need

from . import checkpoint, loop, parallel, plots, progress, runlog, summary
from . import corpus as corpora
from .config import TrainConfig
from .loop import Trainer
from .presets import preset

# What may change when a run continues. Anything else would make it another run, or is part of the
# optimizer's state (weight_decay, beta1, beta2) and comes from the checkpoint.
_SCHEDULE = {"steps", "learning_rate", "final_learning_rate_ratio", "warmup_steps"}
# Settings that do not affect whether a preset reaches its target loss.
_HARMLESS = {"device", "tensorboard", "wandb", "log_every", "validate_every", "checkpoint_every"}
_HARMLESS |= {"keep"}
# Settings that decide the shapes of the weights.
_WEIGHT_SIZES = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads",
                 "head_dim", "num_experts", "intermediate_size")  # fmt: skip
_CHANGEABLE = _SCHEDULE | _HARMLESS | {"gradient_clip", "expert_parallel"}


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonicmoe"


def default_preset() -> str:
    """`small` where there is a GPU, `demo` elsewhere."""
    return "small" if torch.cuda.is_available() else "demo"


def configure(preset_name: str | None, overrides: dict[str, Any]) -> TrainConfig:
    """A preset or the run in `init_from`, with changes. `target_loss` must then be given anew."""
    if init_from := overrides.get("init_from"):
        if preset_name:
            expected = "no value with init_from, whose settings the new run has"
            raise bad_argument("preset", expected, preset_name, "Omit one of the two.")
        return load_config(Path(init_from)).override({"target_loss": None, **overrides})
    wants_cpu = overrides.get("device") == "cpu"
    base = preset(preset_name or ("demo" if wants_cpu else default_preset()))
    if set(overrides) - _HARMLESS:
        overrides = {"target_loss": None, **overrides}
    return base.override(overrides)


def check(config: TrainConfig, world: parallel.World, resume: bool = False) -> None:
    """Check everything before any text is prepared and any folder is created."""
    loop.check(config, world)
    corpora.check(config)
    if config.wandb:
        need("wandb", "wandb=true")
    if config.init_from and not resume:
        _check_initial(config, Path(config.init_from))


def _check_initial(config: TrainConfig, folder: Path) -> None:
    """Raise if the run in `folder` has no weights, or weights of other sizes."""
    given = load_config(folder).model
    if not checkpoint.steps(folder / "checkpoints") or not (folder / "tokenizer.json").is_file():
        expected, remedy = "a run with a checkpoint and tokenizer.json", "Train it with keep=1."
        raise bad_argument("init_from", expected, str(folder), remedy)
    for name in _WEIGHT_SIZES:
        theirs, ours = getattr(given, name), getattr(config.model, name)
        if ours != theirs:
            expected = f"{theirs}, as in {folder}"
            raise bad_argument(name, expected, ours, f"Omit {name}.")


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
        check(config, world, resume)
        if resume:
            world.from_first(lambda: _lock(folder, held))
        else:
            check_writable("--runs", folder.parent)
        key = _record(folder)[1] if resume else None
        if not world.first:
            world.wait()  # the first rank prepares the text, the others find it in the cache
        # The folder of `init_from` may be gone when a run continues.
        tokenizer = folder / "tokenizer.json" if resume and config.init_from else None
        corpus = corpora.prepare(config, cache, display.say, key, tokenizer)
        if world.first:
            world.wait()
        if not resume:
            folder = world.from_first(lambda: _locked_folder(folder, numbered, held))
        return _train(config, folder, cache, corpus, resume, picture, world, display)


def _train(config, folder, cache, corpus, resume, picture, world, display) -> dict[str, Any]:
    head, line = summary.title(config)
    display.say(f"{head}\n  {line}\n  in {folder}")
    trainer = Trainer(config, folder, corpus, world, display, resume)
    if world.first:  # not before the trainer has accepted the configuration
        shutil.copy(corpus.tokenizer_path, folder / "tokenizer.json")
        _write_record(folder, config, corpus.key, cache)
    first, steps = trainer.step, config.steps
    if resume and first < steps:
        display.say(f"Continuing after step {first}.")
    finished = first == steps or trainer.train()
    numbers = summary.summarise(trainer) | {
        "finished": finished,
        "trained": trainer.step - first,
        "rank": world.rank,
        "folder": str(folder),
    }
    if world.first and numbers["trained"]:
        summary.write(folder, numbers)
        if picture:
            texts, sizes = (head, line.replace("; ", "\n", 1)), config.model.vocab_size
            log = runlog.read(folder)
            plots.loss_curve(folder / "loss.png", log, *texts, sizes, config.target_loss)
    return numbers


def load_config(folder: Path) -> TrainConfig:
    """The configuration of an earlier run."""
    return _record(folder)[0]


def cache_of(folder: Path) -> Path:
    """Folder of the tokenized text of an earlier run, or the default if that is gone."""
    path = _record(folder)[2]
    return path if path.is_absolute() and path.is_dir() else default_cache()


def _record(folder: Path) -> tuple[TrainConfig, str, Path]:
    """The contents of run.json: the configuration, the name of the corpus and its cache."""
    path = folder / "run.json"
    if not path.is_file():
        got = repr(str(folder))
        raise bad_argument("run", "the folder of an earlier run", got, "Look below runs/.")
    try:
        record = json.loads(path.read_bytes())
        config = TrainConfig.from_dict(record["config"])
        return config, str(record["corpus"]), Path(record.get("cache", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        got, remedy = f"{path} ({error!r})", "The file is damaged: restore it."
        raise bad_argument("run", "a run.json with a configuration", got, remedy) from None


def continued(folder: Path, overrides: dict[str, Any]) -> TrainConfig:
    """The configuration of an earlier run with `overrides`, of settings that may change."""
    fixed = sorted(set(overrides) - _CHANGEABLE)
    if fixed:
        allowed = f"changes only of {', '.join(sorted(_CHANGEABLE))}"
        remedy = "Start a new run for other settings."
        raise bad_argument("--resume", allowed, ", ".join(fixed), remedy)
    config = load_config(folder)
    return config.override({"warmup_steps": config.warmup_steps, **overrides})


def fresh_folder(runs: Path, name: str) -> Path:
    """Create runs/name, or runs/name-2, … if it exists. No two processes get the same one."""
    folder, number = runs / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = runs / f"{name}-{number}"


@contextlib.contextmanager
def new_folder(folder: Path, numbered: bool = True) -> Iterator[Path]:
    """Create `folder`, or the next free number of it. Removed again if no run starts in it."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    if numbered:
        folder = fresh_folder(folder.parent, folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        if (numbered or folder in made) and not any(folder.rglob("run.json")):
            shutil.rmtree(folder, ignore_errors=True)
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()
        raise


def _locked_folder(folder: Path, numbered: bool, held: contextlib.ExitStack) -> Path:
    """Create and lock the folder of a new run."""
    folder = held.enter_context(new_folder(folder, numbered))
    _lock(folder, held)
    if checkpoint.steps(folder / "checkpoints"):
        remedy = "Continue that run with resume, or choose another folder."
        expected = "one without checkpoints for a new run"
        raise bad_argument("folder", expected, str(folder), remedy)
    return folder


def _lock(folder: Path, held: contextlib.ExitStack) -> None:
    """Keep other trainings out of `folder` until `held` is closed or this process ends."""
    file = held.enter_context(open(folder / ".lock", "a"))  # noqa: SIM115 closed by `held`
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        expected, remedy = "a folder in which no other process trains", "Wait for it or stop it."
        raise bad_argument("run", expected, str(folder), remedy) from None
    except OSError as error:  # some network file systems have no locks
        print(f"{folder} is not locked ({error.strerror}): run only one training in it.")


def _write_record(folder: Path, config: TrainConfig, corpus: str, cache: Path) -> None:
    path = folder / "run.json"
    fresh = path.with_suffix(".new")
    record = {"config": config.to_dict(), "corpus": corpus, "cache": str(cache.resolve())}
    fresh.write_text(json.dumps(record, indent=1))
    fresh.replace(path)
