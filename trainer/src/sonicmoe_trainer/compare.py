"""The same training with several routers, backends or seeds: one plot and one table."""

import dataclasses
import gc
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sonicmoe.plugins import bad_argument, check_writable, table

from . import parallel, plots, run, runlog, summary
from .config import TrainConfig
from .progress import count, human_bytes


def variants(
    config: TrainConfig, routers: str, backends: str, seeds: str | None
) -> dict[str, TrainConfig]:
    """Every combination under a name that says what differs."""
    choices = {
        "router": names("--routers", routers),
        "backend": names("--backends", backends),
        "seed": [str(config.seed)] if seeds is None else names("--seeds", seeds),
    }
    varying = [key for key, values in choices.items() if len(values) > 1] or ["router"]
    found = {}
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        variant = config.override({**chosen, "target_loss": None})
        labels = (f"seed {chosen[k]}" if k == "seed" else chosen[k] for k in varying)
        found[", ".join(labels)] = variant
    return found


def compare(configs: dict[str, TrainConfig], folder: Path, cache: Path) -> str:
    """Train every variant in a folder of its own below `folder`; return the table.

    All are checked before the first one is trained.
    """
    for config in configs.values():
        run.check(config, parallel.start(config.device))
    check_writable("--runs", folder.parent)
    with run.new_folder(folder) as folder:
        return _compare(configs, folder, cache)


def _compare(configs: dict[str, TrainConfig], folder: Path, cache: Path) -> str:
    results = dict(train_each(configs, folder, cache))
    text = _table(results)
    (folder / "compare.json").write_text(json.dumps(results, indent=1))
    (folder / "compare.md").write_text(text + "\n")
    _, line = summary.title(next(iter(configs.values())))
    logs = {name: runlog.read(folder / slug(name)) for name in results}
    plots.comparison(folder / "compare.png", logs, _title(results), _shared(line))
    files = "compare.png, compare.md, compare.json and a folder per run"
    return f"\n{text}\n\nKept in {folder}: {files}."


def train_each(
    configs: Mapping[str, TrainConfig], folder: Path, cache: Path, pictures: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train one after the other; yields name and numbers of each, until a signal ends one early.

    Runs that differ only in the seed share compiled code if they follow each other.
    """
    before: TrainConfig | None = None
    for i, (name, config) in enumerate(configs.items(), 1):
        print(f"\n=== {name} ({i} of {len(configs)})", flush=True)
        if config.compile and before and dataclasses.replace(before, seed=config.seed) != config:
            torch.compiler.reset()  # PyTorch gives up compiling after eight variants of a function
        before = config
        numbers = run.train(config, folder / slug(name), cache, picture=pictures)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield name, numbers
        if not numbers["finished"]:
            print("Stopped: the comparison contains the runs so far.")
            return


def _table(results: dict[str, dict[str, Any]]) -> str:
    """Differences are against the first row."""
    base = next(iter(results.values()))
    rows = []
    for name, r in results.items():
        loss, speed = r["validation_loss"], r["tokens_per_second"]
        change = "" if r is base else f"{loss / base['validation_loss'] - 1:+.2%}"
        losses = (f"{loss:.4f}", change, f"{math.exp(min(loss, 700)):.2f}", f"{r['last_loss']:.4f}")
        speeds = (count(speed), f"{speed / base['tokens_per_second']:.2f}")
        costs = (human_bytes(r["peak_memory"]), f"{r['seconds']:.0f} s")
        rows.append((name, *losses, *speeds, *costs))
    losses = ("validation loss", "change", "perplexity", "training loss")
    return table(("run", *losses, "tokens/s", "speed", "peak memory", "time"), rows)


def _title(results: dict[str, dict[str, Any]]) -> str:
    first = next(iter(results.values()))
    size = count(first["parameters"])
    return f"{first['preset']} ({size} parameters), {len(results)} trainings on the same text"


def _shared(line: str) -> str:
    """The description of a run without its router, which may differ."""
    before, _, after = line.partition(", router ")
    return f"{before}; {after.partition('; ')[2]}"


def names(argument: str, text: str) -> list[str]:
    found = [n.strip() for n in text.split(",") if n.strip()]
    if not found or len(set(found)) < len(found):
        raise bad_argument(argument, "different names with commas", repr(text), "Remove repeats.")
    return found


def slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
