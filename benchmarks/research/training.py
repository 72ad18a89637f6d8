"""What the layer does to a training: four experiments whose numbers are kept.

rounding    does token rounding cost quality, at few and at many rows an expert?
throughput  tokens/s and peak memory of a whole model, beside PyTorch's own grouped products
agreement   does a model train on the kernels as it trains on plain PyTorch?
precision   does a model train with experts in FP8 as it trains in bf16?
"""

import contextlib
import dataclasses
import json
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sonicmoe.bench.results import provenance
from sonicmoe.errors import bad_argument
from sonicmoe.extras import MissingExtra
from sonicmoe.train import corpus, runlog
from sonicmoe.train.backends import check_backend
from sonicmoe.train.compare import slug, train_each
from sonicmoe.train.config import TrainConfig
from sonicmoe.train.presets import preset
from sonicmoe.train.run import train

# Experts sharp enough to be told apart, rows enough for a GPU: 16384 tokens go to 2 of E experts.
# E = 64, 128 and 256 give 512, 256 and 128 rows an expert, and 109M, 210M and 411M parameters.
BASE = dataclasses.replace(
    preset("small").override({
        "vocab_size": 8192, "num_layers": 4, "num_experts": 64, "experts_per_token": 2,
        "batch": 16, "micro_batch": 16, "data_megabytes": 96, "validation_fraction": 0.02,
        "compile": False, "keep": 0, "tensorboard": False,
    }),
    preset="evidence",
)  # fmt: skip

# Four micro-batches a step, to amortise the optimizer; little text, since nothing is learnt.
THROUGHPUT = preset("1.4B").override({
    "batch": 40, "steps": 12, "log_every": 2, "validation_sequences": 10, "data_megabytes": 8,
    "validation_fraction": 0.05, "keep": 0, "tensorboard": False, "deterministic": False,
})  # fmt: skip

ROUTERS = {
    "top-K": "topk_over_softmax",  # the scores of token rounding, unrounded
    "token rounding NR-f": "token_rounding:nr-f",
    "token rounding DOWN": "token_rounding:down",
    "expert choice": "expert_choice",
}
CALIBRATION_STEPS = 24


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs and tokenised text go; neither need be kept."""

    runs: Path
    cache: Path


# --- rounding -------------------------------------------------------------------------------------
def rounding(
    base: TrainConfig,
    rows: int,
    place: Place,
    *,
    routers: Sequence[str],
    seeds: Sequence[str],
    seconds: float,
    steps: int | None = None,
    jobs: int = 1,
) -> list[dict[str, Any]]:
    """Each router from the same seeds, for as many steps as the slowest does in `seconds`.

    The first router is the one that the others are held against. `jobs` trainings share the device,
    since nothing is timed: a small model leaves most of it idle.
    """
    if unknown := set(routers) - set(ROUTERS):
        raise bad_argument(
            "--routers", f"some of {', '.join(ROUTERS)}", ", ".join(unknown), "Choose among them."
        )
    chosen = {label: ROUTERS[label] for label in routers}
    config = with_rows(base, rows)
    folder = place.runs / f"rounding-{rows}"
    if steps is None:
        steps = _affordable_steps(config, chosen, seconds, folder / "calibration", place.cache)
    timed = config.override({
        "steps": steps, "log_every": max(1, steps // 60), "validate_every": max(1, steps // 10),
    })  # fmt: skip
    configs = {
        f"{label}, seed {seed}": timed.override({"router": router, "seed": seed})
        for label, router in chosen.items()
        for seed in seeds
    }
    records = _trained("rounding", configs, folder, place.cache, jobs)
    for record in records:
        record |= {"rows_per_expert": rows, "tile": config.model.rounding_tile}
    return records


def with_rows(base: TrainConfig, rows: int) -> TrainConfig:
    """As many experts as give each `rows` rows of a micro-batch, T·K/E."""
    routed = base.micro_batch * base.model.context * base.model.experts_per_token
    if rows < 1 or routed % rows:
        raise bad_argument(
            "--rows-per-expert", f"a divisor of the {routed} rows of a micro-batch", rows,
            "Rows an expert are tokens · K / E.",
        )  # fmt: skip
    return base.override({"num_experts": routed // rows})


def _affordable_steps(
    config: TrainConfig, routers: Mapping[str, str], seconds: float, folder: Path, cache: Path
) -> int:
    """Steps that every router can do in `seconds`; what is compiled is compiled here."""
    short = config.override({
        "steps": CALIBRATION_STEPS, "log_every": CALIBRATION_STEPS // 4,
        "validate_every": CALIBRATION_STEPS, "validation_sequences": config.micro_batch,
    })  # fmt: skip
    configs = {label: short.override({"router": r}) for label, r in routers.items()}
    rates = [n["tokens_per_second"] for _, n in train_each(configs, folder, cache, pictures=False)]
    steps = int(seconds * min(rates) / config.tokens_per_step)
    return max(20, steps // 10 * 10)


# --- throughput -----------------------------------------------------------------------------------
def throughput(base: TrainConfig, backends: Sequence[str], place: Place) -> list[dict[str, Any]]:
    """The same few steps on every backend; the first one once more with repeatable operators."""
    configs, missing = {}, []
    for name in backends:
        try:
            check_backend(name, base)
            configs[name] = base.override({"backend": name})
        except MissingExtra:
            missing.append({"experiment": "throughput", "run": name, "failed": "not installed"})
    first = backends[0]
    configs[f"{first}, deterministic"] = base.override({"backend": first, "deterministic": True})
    records = []
    for name, config in configs.items():
        if config.compile:
            torch.compiler.reset()
        try:
            records += _trained(
                "throughput", {name: config}, place.runs / "throughput", place.cache
            )
        except torch.cuda.OutOfMemoryError:
            records.append({"experiment": "throughput", "run": name, "failed": "out of memory"})
    return records + missing


# --- agreement ------------------------------------------------------------------------------------
def agreement(base: TrainConfig, backends: Sequence[str], place: Place) -> list[dict[str, Any]]:
    """Several backends from the same seed: their training losses, step by step.

    The last is what the others are held against. Training amplifies every rounding, so a third
    backend shows how far apart two that are both right come to be.
    """
    configs = {
        name: base.override({
            "backend": name, "router": "softmax_over_topk", "log_every": 1,
            "validate_every": base.steps, "learning_rate": 3e-4, "warmup_steps": base.steps // 4,
        })
        for name in backends
    }  # fmt: skip
    return _trained("agreement", configs, place.runs / "agreement", place.cache)


# --- precision ------------------------------------------------------------------------------------
def precision(
    base: TrainConfig,
    place: Place,
    *,
    precisions: Sequence[str],
    seeds: Sequence[str],
    steps: int,
    jobs: int = 1,
) -> list[dict[str, Any]]:
    """Each precision from the same seeds; the first is the one that the others are held against."""
    timed = base.override({
        "steps": steps, "log_every": max(1, steps // 60), "validate_every": max(1, steps // 10),
    })  # fmt: skip
    configs = {
        f"{name}, seed {seed}": timed.override({"precision": name, "seed": seed})
        for name in precisions
        for seed in seeds
    }
    return _trained("precision", configs, place.runs / "precision", place.cache, jobs)


# --- what all share -------------------------------------------------------------------------------
_KEPT = ("parameters", "active_parameters", "device", "backend", "steps", "tokens", "epochs",
         "seconds", "last_loss", "validation_loss", "tokens_per_second", "flops_per_second",
         "peak_share", "finished")  # fmt: skip


def _trained(
    experiment: str, configs: Mapping[str, TrainConfig], folder: Path, cache: Path, jobs: int = 1
) -> list[dict[str, Any]]:
    if jobs > 1:
        trained = _train_side_by_side(configs, folder, cache, jobs)
    else:
        trained = train_each(configs, folder, cache, pictures=False)
    records = []
    for name, numbers in trained:
        log = runlog.read(folder / slug(name))
        curves = {
            key: [(r["step"], r["loss"]) for r in log if r["kind"] == kind]
            for key, kind in (("curve", "train"), ("validation", "validation"))
        }
        # On a CPU the peak is that of the process, earlier runs included.
        peak = numbers["peak_memory"] if torch.cuda.is_available() else None
        records.append(
            {"experiment": experiment, "run": name, **{k: numbers[k] for k in _KEPT}, "jobs": jobs}
            | {"peak_memory": peak, "config": configs[name].to_dict(), **curves}
        )
    return records


def _train_side_by_side(
    configs: Mapping[str, TrainConfig], folder: Path, cache: Path, jobs: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """In processes of their own, which write what they print into the folders of the runs."""
    corpus.prepare(next(iter(configs.values())), cache)  # all train on the same text
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        runs = {
            pool.submit(_train_alone, config, folder / slug(name), cache): name
            for name, config in configs.items()
        }
        found = {}
        for run in as_completed(runs):
            found[runs[run]] = numbers = run.result()
            print(
                f"{len(found)} of {len(runs)} trained: {runs[run]}, "
                f"validation loss {numbers['validation_loss']:.4f}, {numbers['seconds']:.0f} s",
                flush=True,
            )
    for name in configs:
        yield name, found[name]


def _train_alone(config: TrainConfig, folder: Path, cache: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output.txt", "w") as file, contextlib.redirect_stdout(file):
        return train(config, folder, cache, picture=False)


def keep(
    records: Sequence[Mapping[str, Any]], folder: Path, command: str, commit: str | None
) -> None:
    """evidence.json, from which `training_report` makes tables and pictures."""
    origin = provenance("cuda" if torch.cuda.is_available() else "cpu", command, commit)
    (folder / "evidence.json").write_text(json.dumps({**origin, "records": records}) + "\n")
