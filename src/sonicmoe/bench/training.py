"""What the layer does to a training: three experiments whose numbers and pictures are kept.

rounding    does token rounding cost quality, at few and at many rows an expert?
throughput  tokens/s and peak memory of a whole model, beside PyTorch's own grouped products
agreement   does a model train on the kernels as it trains on plain PyTorch?
"""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import bad_argument
from ..train import accounting, corpus, plots, runlog
from ..train.backends import check_backend
from ..train.compare import slug, train_each
from ..train.config import TrainConfig
from ..train.extras import MissingExtra
from ..train.presets import preset
from ..train.progress import count, human_bytes
from ..train.run import train
from ..train.tables import table
from .results import provenance

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
    """Where things go: `output` is kept, the folders of the runs need not be.

    `jobs` trainings share the device where nothing is timed: a small model leaves most of it idle.
    """

    output: Path
    runs: Path
    cache: Path
    jobs: int = 1


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
) -> list[dict[str, Any]]:
    """Each router from the same seeds, for as many steps as the slowest does in `seconds`.

    The first router is the one that the others are held against.
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
    records = _trained("rounding", configs, folder, place.cache, place.jobs)
    for record in records:
        record |= {"rows_per_expert": rows, "tile": config.model.rounding_tile}
    if plots.available() and len(records) == len(configs):
        curves: dict[str, list] = {label: [] for label in chosen}
        for record in records:
            curves[record["run"].partition(", seed")[0]].append(record["validation"])
        plots.against_first(
            place.output / f"rounding-{rows}.png",
            curves,
            f"Token rounding at {rows} rows an expert ({_tiles(config, rows)})",
            _subtitle(records[0], timed) + "\nValidation always chooses experts by plain top-K. "
            f"Thin: {len(seeds)} seeds. Thick: their mean.",
        )
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


def rounding_table(records: Sequence[Mapping[str, Any]]) -> str:
    """One line a router. Differences are between runs of the same seed: mean ± standard error."""
    losses: dict[str, dict[str, float]] = {}
    for r in records:
        label, _, seed = r["run"].partition(", seed ")
        losses.setdefault(label, {})[seed] = r["validation_loss"]
    base = next(iter(losses.values()))
    lines = []
    for label, by_seed in losses.items():
        changes = [loss / base[seed] - 1 for seed, loss in by_seed.items()]
        lines.append((
            label, *(f"{loss:.4f}" for loss in by_seed.values()),
            f"{sum(by_seed.values()) / len(by_seed):.4f}",
            "" if by_seed is base else _mean_and_error(changes),
            "" if by_seed is base else f"{min(changes):+.2%} … {max(changes):+.2%}",
        ))  # fmt: skip
    header = (
        "router",
        *(f"seed {s}" for s in base),
        "mean",
        "against top-K",
        "by seed",
    )
    return table(header, lines)


def _mean_and_error(changes: Sequence[float]) -> str:
    text = f"{statistics.fmean(changes):+.2%}"
    if len(changes) > 2:
        text += f" ± {statistics.stdev(changes) / math.sqrt(len(changes)):.2%}"
    return text


# --- throughput -----------------------------------------------------------------------------------
def throughput(base: TrainConfig, backends: Sequence[str], place: Place) -> list[dict[str, Any]]:
    """The same few steps on every backend; the first one once more with repeatable operators."""
    configs, missing = {}, []
    for name in backends:
        try:
            check_backend(name, base.model.router)
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


def throughput_table(records: Sequence[Mapping[str, Any]]) -> str:
    rate = next((r["tokens_per_second"] for r in records if "failed" not in r), 1.0)
    lines = []
    for r in records:
        if "failed" in r:
            lines.append((r["run"], r["failed"], "", "", ""))
            continue
        lines.append((
            r["run"], count(r["tokens_per_second"]), f"{r['tokens_per_second'] / rate:.2f}",
            f"{r['peak_share']:.1%}" if r["peak_share"] is not None else "–",
            human_bytes(r["peak_memory"]) if r["peak_memory"] else "–",
        ))  # fmt: skip
    return table(("backend", "tokens/s", "of the first", "of peak FLOP/s", "peak memory"), lines)


_IN_WORDS = {
    "auto": "SonicMoE",
    "sonicmoe": "SonicMoE's kernels",
    "torch": "plain PyTorch",
    "grouped_mm": "PyTorch's grouped_mm",
    "scattermoe": "ScatterMoE",
}


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
    records = _trained("agreement", configs, place.runs / "agreement", place.cache)
    if plots.available() and len(records) == len(backends):
        plots.on_top(
            place.output / "agreement.png",
            {_IN_WORDS[r["run"]]: r["curve"] for r in records},
            f"The same training computed by {', by '.join(_IN_WORDS[b] for b in backends)}",
            _subtitle(records[0], next(iter(configs.values()))),
        )
    return records


def agreement_table(records: Sequence[Mapping[str, Any]]) -> str:
    base = dict(records[-1]["curve"])
    lines = []
    for r in records:
        apart = [abs(loss - base[step]) for step, loss in r["curve"]]
        lines.append((
            r["run"], f"{r['curve'][0][1]:.5f}", f"{r['curve'][-1][1]:.5f}",
            f"{r['validation_loss']:.5f}", f"{max(apart):.2g}", count(r["tokens_per_second"]),
        ))  # fmt: skip
    return table(
        ("backend", "first loss", "last loss", "validation loss", "farthest from the last",
         "tokens/s"), lines,
    )  # fmt: skip


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


def _tiles(config: TrainConfig, rows: int) -> str:
    tile = config.model.rounding_tile
    return f"{rows / tile:g} {'tile' if rows == tile else 'tiles'} of {tile}"


def _subtitle(record: Mapping[str, Any], config: TrainConfig) -> str:
    m, size = config.model, accounting.parameters(config.model)
    return (
        f"{count(size.total)} parameters ({count(size.active)} met by a token), {m.num_layers} "
        f"layers, {m.experts_per_token} of {m.num_experts} experts; {record['steps']} steps of "
        f"{count(config.tokens_per_step)} tokens, {record['epochs']:.2f} passes over the text; "
        f"{record['device']}"
    )


TABLES = {"rounding": rounding_table, "throughput": throughput_table, "agreement": agreement_table}


def write(
    records: Sequence[Mapping[str, Any]], output: Path, command: str, commit: str | None = None
) -> str:
    """evidence.json with everything, evidence.md with the tables; the tables are returned."""
    origin = provenance("cuda" if torch.cuda.is_available() else "cpu", command, commit)
    (output / "evidence.json").write_text(json.dumps({**origin, "records": records}) + "\n")
    parts = [
        f"`{command}`, {origin['date'][:10]}, {origin['device']}, torch {origin['torch']}, triton "
        f"{origin['triton']}, Python {origin['python']}, commit {origin['commit']}."
    ]
    groups: dict[tuple, list] = {}
    for r in records:
        groups.setdefault((r["experiment"], r.get("rows_per_expert")), []).append(r)
    for (experiment, rows), group in groups.items():
        parts += _section(experiment, rows, group)
    text = "\n\n".join(["# Evidence from training", *parts])
    (output / "evidence.md").write_text(text + "\n")
    return text


def _section(experiment: str, rows: int | None, group: list[Mapping[str, Any]]) -> list[str]:
    title, picture = experiment.capitalize(), f"{experiment}.png"
    if rows:
        title, picture = f"{title}, {rows} rows an expert", f"{experiment}-{rows}.png"
    parts = [f"## {title}"]
    trained = next((r for r in group if "failed" not in r), None)
    if trained:
        config = TrainConfig.from_dict(trained["config"])
        parts.append(
            f"{_subtitle(trained, config)}; precision {config.precision}, "
            f"compile={str(config.compile).lower()}, "
            f"deterministic={str(config.deterministic).lower()}."
        )
    parts.append(TABLES[experiment](group))
    if experiment != "throughput":
        parts.append(f"![{title}]({picture})")
    return parts
