"""What the layer does to a training: four experiments whose numbers are kept.

rounding    does token rounding cost quality, at few and at many rows an expert?
throughput  tokens/s and peak memory of a whole model, beside PyTorch's own grouped GEMMs
agreement   does a model train on the kernels as it trains on plain PyTorch?
precision   does a model train with experts in FP8 as it trains in bf16?

A fifth, whether a trained model with outliers is fine-tuned in FP8 as in bf16, is in `finetune.py`.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sonicmoe.errors import bad_argument
from sonicmoe.extras import MissingExtra
from sonicmoe_trainer import corpus, parallel, runlog
from sonicmoe_trainer.backends import check_backend
from sonicmoe_trainer.compare import slug, train_each
from sonicmoe_trainer.config import TrainConfig
from sonicmoe_trainer.presets import preset
from sonicmoe_trainer.run import check, train

# Experts sharp enough to be told apart, rows enough for a GPU: 16384 tokens go to 2 of E experts.
# E = 64, 128 and 256 give 512, 256 and 128 rows an expert, and 109M, 210M and 411M parameters.
BASE = dataclasses.replace(
    preset("small").override({
        "vocab_size": 8192, "num_layers": 4, "num_experts": 64, "experts_per_token": 2,
        "batch": 16, "micro_batch": 16, "data_megabytes": 96, "validation_fraction": 0.02,
        "compile": False, "keep": 0, "tensorboard": False, "deterministic": True,
    }),
    preset="evidence",
)  # fmt: skip

# Four micro-batches a step, to amortise the optimizer; little text, since nothing is learnt.
THROUGHPUT = preset("1.4B").override({
    "batch": 40, "steps": 12, "log_every": 2, "validation_sequences": 10, "data_megabytes": 8,
    "validation_fraction": 0.05, "keep": 0, "tensorboard": False,
})  # fmt: skip

ROUTERS = {
    "top-K": "topk_over_softmax",  # the scores of token rounding, unrounded
    "token rounding NR-f": "token_rounding:nr-f",
    "token rounding DOWN": "token_rounding:down",
    "expert choice": "expert_choice",
}
CALIBRATION_STEPS = 24
NOT_INSTALLED = "not installed"
_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG

Records = Iterator[dict[str, Any]]


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
) -> Records:
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
    timed = of_length(config, steps)
    configs = {
        f"{label}, seed {seed}": timed.override({"router": router, "seed": seed})
        for label, router in chosen.items()
        for seed in seeds
    }
    fields = {"rows_per_expert": rows, "tile": config.model.rounding_tile}
    return trained("rounding", configs, folder, place.cache, jobs, fields)


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
def throughput(base: TrainConfig, backends: Sequence[str], place: Place) -> Records:
    """The same few steps on every backend; the first one once more with repeatable operators."""
    configs, missing = {}, []
    for name in backends:
        try:
            check_backend(name, base)
            configs[name] = base.override({"backend": name})
        except MissingExtra:
            missing.append({"experiment": "throughput", "run": name, "failed": NOT_INSTALLED})
    first = backends[0]
    configs[f"{first}, deterministic"] = base.override({"backend": first, "deterministic": True})
    records = trained("throughput", configs, place.runs / "throughput", place.cache)
    return itertools.chain(records, missing)


# --- agreement ------------------------------------------------------------------------------------
def agreement(base: TrainConfig, backends: Sequence[str], place: Place) -> Records:
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
    return trained("agreement", configs, place.runs / "agreement", place.cache)


# --- precision ------------------------------------------------------------------------------------
def precision(
    base: TrainConfig,
    place: Place,
    *,
    variants: Sequence[str],
    seeds: Sequence[str],
    lengths: Sequence[str],
    jobs: int = 1,
) -> Records:
    """Each variant from the same seeds, for each number of steps; the first is the baseline.

    A variant is a precision, and +KEY=VALUE for each other setting that it changes.
    """
    configs = {
        f"{variant}, seed {seed}, {length} steps": of_length(base, length).override(
            {**settings_of(variant), "seed": seed}
        )
        for length in lengths
        for seed in seeds  # the runs of a pair one after the other: neither is alone for long
        for variant in variants
    }
    return trained("precision", configs, place.runs / "precision", place.cache, jobs)


def settings_of(variant: str) -> dict[str, str]:
    """`"fp8+memory=fp8"` → `{"precision": "fp8", "memory": "fp8"}`."""
    name, *changes = variant.split("+")
    assignments = (change.partition("=") for change in changes)
    return {"precision": name} | {key: value for key, _, value in assignments}


# --- what all share -------------------------------------------------------------------------------
_KEPT = ("parameters", "active_parameters", "device", "backend", "steps", "tokens", "epochs",
         "seconds", "last_loss", "validation_loss", "tokens_per_second", "flops_per_second",
         "peak_share", "finished")  # fmt: skip


def of_length(config: TrainConfig, steps: int | str) -> TrainConfig:
    """A schedule of `steps` steps, with some 60 points of the training curve and 10 validations."""
    config = config.override({"steps": steps})
    return config.override({
        "log_every": max(1, config.steps // 60), "validate_every": max(1, config.steps // 10),
    })  # fmt: skip


def trained(
    experiment: str,
    configs: Mapping[str, TrainConfig],
    folder: Path,
    cache: Path,
    jobs: int = 1,
    fields: Mapping[str, Any] | None = None,
) -> Records:
    """A record of each run, as soon as it and those before it are done; a failed one says why.

    All configurations are checked before the first run.
    """
    for config in configs.values():
        check(config, parallel.start(config.device))
    runner = _side_by_side if jobs > 1 else _one_after_the_other
    return (
        {"experiment": experiment, "run": name, **(fields or {}), "jobs": jobs}
        | {"config": configs[name].to_dict(), **_numbers(name, found, folder)}
        for name, found in runner(configs, folder, cache, jobs)
    )


def _numbers(name: str, found: dict[str, Any] | Exception, folder: Path) -> dict[str, Any]:
    if isinstance(found, Exception):
        text = f"{type(found).__name__}: {found}".splitlines()[0]
        if isinstance(found, torch.cuda.OutOfMemoryError):
            text = "out of memory"
        print(f"FAILED {name}: {text}", flush=True)
        return {"failed": text}
    log = runlog.read(folder / slug(name))
    curves = {
        key: [(r["step"], r["loss"]) for r in log if r["kind"] == kind]
        for key, kind in (("curve", "train"), ("validation", "validation"))
    }
    # On a CPU the peak is that of the process, earlier runs included.
    peak = found["peak_memory"] if torch.cuda.is_available() else None
    return {**{k: found[k] for k in _KEPT}, "peak_memory": peak, **curves}


Found = Iterator[tuple[str, dict[str, Any] | Exception]]


def _one_after_the_other(
    configs: Mapping[str, TrainConfig], folder: Path, cache: Path, jobs: int = 1
) -> Found:
    for name, config in configs.items():
        if config.compile:
            torch.compiler.reset()  # PyTorch gives up compiling after eight variants of a function
        try:
            ((_, numbers),) = train_each({name: config}, folder, cache, pictures=False)
        except Exception as error:
            yield name, error
            continue
        yield name, numbers
        if not numbers["finished"]:
            return


def _side_by_side(
    configs: Mapping[str, TrainConfig], folder: Path, cache: Path, jobs: int
) -> Found:
    """`jobs` at a time, each in a new process, so that one that crashes harms no other."""
    corpus.prepare(next(iter(configs.values())), cache)  # all train on the same text
    with ThreadPoolExecutor(jobs) as pool:
        runs = {
            name: pool.submit(_in_a_process, config, folder / slug(name), cache, jobs)
            for name, config in configs.items()
        }
        try:
            for i, (name, run) in enumerate(runs.items(), 1):
                try:
                    numbers = run.result()
                except Exception as error:
                    yield name, error
                    continue
                print(
                    f"{i} of {len(runs)} trained: {name}, "
                    f"validation loss {numbers['validation_loss']:.4f}, {numbers['seconds']:.0f} s",
                    flush=True,
                )
                yield name, numbers
                if not numbers["finished"]:
                    return
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _in_a_process(config: TrainConfig, folder: Path, cache: Path, jobs: int) -> dict[str, Any]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_train_quietly, config, folder, cache, jobs).result()


def _train_quietly(config: TrainConfig, folder: Path, cache: Path, jobs: int) -> dict[str, Any]:
    """Train with a share of the cores; what is printed goes to output.txt in `folder`."""
    # Else a run goes on when its parent has been killed.
    ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)
    share = max(1, len(os.sched_getaffinity(0)) // jobs)
    torch.set_num_threads(share)
    # Threads that compile: of this package, and of torch.compile.
    os.environ |= {"LOCAL_WORLD_SIZE": str(jobs), "TORCHINDUCTOR_COMPILE_THREADS": str(share)}
    folder.mkdir(parents=True, exist_ok=True)
    with (
        open(folder / "output.txt", "w") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        return train(config, folder, cache, picture=False)


# --- evidence.json --------------------------------------------------------------------------------
def keep(records: Sequence[Mapping[str, Any]], folder: Path, origin: Mapping[str, Any]) -> None:
    """Write evidence.json, from which `training_report` makes tables and pictures.

    `records` are all of this command, and `origin` their provenance. Records of earlier commands
    stay. A run of `precision` replaces the one of the same name; a run of another experiment
    replaces that whole experiment.
    """
    path = folder / "evidence.json"
    earlier = json.loads(path.read_text()) if path.exists() else {"records": [], **origin}
    replaced = {_name(record) for record in records}
    both = [
        {"date": earlier["date"], **record}
        for record in earlier["records"]
        if _name(record) not in replaced
    ]
    dates = {record["date"] for record in both}
    origins = [{k: v for k, v in earlier.items() if k not in ("records", "earlier")}]
    origins = [o for o in [*earlier.get("earlier", ()), *origins] if o["date"] in dates]
    both += [{**record, "date": origin["date"]} for record in records]
    text = json.dumps({**origin, "earlier": origins, "records": both}) + "\n"
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def _name(record: Mapping[str, Any]) -> tuple:
    """Records with the same name replace each other."""
    run = record["run"] if record["experiment"] == "precision" else None
    return record["experiment"], record.get("rows_per_expert"), run
