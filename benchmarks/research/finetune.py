"""Fine-tuning a model whose expert weights have outliers, as those of large models do.

base       a model is trained
outliers   in every expert a row of W2 and a row of W1 is multiplied; the model recovers in bf16
errors     one batch of the new text: what FP8 makes of the layers' gradients
fine-tune  from the recovered model on other text, each precision from the same seeds
"""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sonicmoe.errors import bad_argument
from sonicmoe.functional import topk_scores
from sonicmoe_trainer import checkpoint, corpus, parallel
from sonicmoe_trainer.batches import Batches
from sonicmoe_trainer.config import TrainConfig
from sonicmoe_trainer.model import Decoder
from sonicmoe_trainer.run import check, load_config

from . import layer_errors, training
from .training import Place, Records

BASE, ERRORS, TUNED = "fine-tuning base", "fine-tuning errors", "fine-tuning"
THIS = "this commit"  # the label of the source that trains
_SCRIPT = Path(__file__).parents[1] / "captured_errors.py"
_SEED = 0  # of the rows that are multiplied

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """The other text, lengths in steps, the outliers' factor, learning rates relative to the base.

    The outliers stay at these learning rates: a step of AdamW moves a weight by about the learning
    rate at most. A factor of 20 cost FP8 at c5da0d4 35% of dW1, 30 cost 74% (CPU, H = 512, two
    layers, 60 steps).
    """

    data: tuple[str, ...]
    base_steps: int = 600
    recover_steps: int = 200
    tune_steps: int = 300
    factor: float = 30.0
    recover_rate: float = 0.3
    tune_rate: float = 0.1


def finetune(
    base: TrainConfig,
    place: Place,
    plan: Plan,
    *,
    variants: Sequence[str],
    seeds: Sequence[str],
    sources: Mapping[str, Path] | None = None,
    jobs: int = 1,
) -> Records:
    """All four steps; `sources` are other checkouts whose errors are measured too, by label.

    Everything that can be checked is checked before the base is trained.
    """
    stages, tuned = _configs(base, plan, variants, seeds)
    for config in (*stages.values(), *tuned.values()):
        check(config, parallel.start(config.device))
    for label, source in (sources or {}).items():
        if not (source / "sonicmoe").is_dir():
            expected, remedy = "LABEL=FOLDER with the package sonicmoe", "Name its src/."
            raise bad_argument("--errors-of", expected, f"{label}={source}", remedy)
    return _finetune(stages, tuned, place, plan, variants, sources or {}, jobs)


def _configs(
    base: TrainConfig, plan: Plan, variants: Sequence[str], seeds: Sequence[str]
) -> tuple[dict[str, TrainConfig], dict[str, TrainConfig]]:
    """The base and its recovery by stage, the fine-tunings by run; none knows its start yet."""

    def of_length(steps: int, rate: float) -> TrainConfig:
        changes = {"learning_rate": rate * base.learning_rate, "checkpoint_every": steps}
        return training.of_length(base, steps).override(changes)

    stages = {
        "base": of_length(plan.base_steps, 1.0).override({"keep": 1}),
        "recovered": of_length(plan.recover_steps, plan.recover_rate).override({"keep": 1}),
    }
    other = of_length(plan.tune_steps, plan.tune_rate).override({"data": plan.data})
    tuned = {
        f"{variant}, seed {seed}": other.override({**training.settings_of(variant), "seed": seed})
        for seed in seeds
        for variant in variants
    }
    return stages, tuned


def _finetune(stages, tuned, place: Place, plan: Plan, variants, sources, jobs: int) -> Records:
    folder = place.runs / "finetune"
    for name in (*stages, "planted"):  # a run with checkpoints is never replaced by another
        shutil.rmtree(folder / name, ignore_errors=True)
    (record,) = training.trained(BASE, {"base": stages["base"]}, folder, place.cache)
    if record.get("finished"):
        record["outliers"] = outliers(_weights(folder / "base"))
    yield record
    if not record.get("finished"):
        return

    planted = plant(folder / "base", folder / "planted", plan.factor)
    config = stages["recovered"].override({"init_from": str(folder / "planted")})
    (record,) = training.trained(BASE, {"recovered": config}, folder, place.cache)
    record |= {"factor": plan.factor, "planted": planted}
    if record.get("finished"):
        record["outliers"] = outliers(_weights(folder / "recovered"))
    yield record
    if not record.get("finished"):
        return

    start = {"init_from": str(folder / "recovered")}
    tuned = {name: config.override(start) for name, config in tuned.items()}
    layers = capture(next(iter(tuned.values())), place.cache)
    known = list(dict.fromkeys(map(_variant_of_experts, variants)))
    device = parallel.start(record["config"]["device"]).device.type
    yield from measure_here(layers, known, device)
    for label, source in sources.items():
        yield from measure(label, source, layers, known, folder / "captured.pt")
    yield from training.trained(TUNED, tuned, folder, place.cache, jobs)


# --- outliers -------------------------------------------------------------------------------------
def plant(base: Path, target: Path, factor: float) -> dict[str, float]:
    """A copy of the run `base` with outliers in its newest checkpoint; their size is returned.

    Row c of every W2 is multiplied, and the norms that read channel c are divided: experts write
    a large channel into the residual stream, whose readers scale it down. Row r of the up half of
    every W1 is multiplied and column r of W2 divided, which leaves the layer's output as it is.
    """
    target.mkdir(parents=True)
    for name in ("run.json", "tokenizer.json"):
        shutil.copy(base / name, target)
    state = checkpoint.load_latest(base / "checkpoints")
    weights = {name: t.clone() for name, t in state["model"].items()}
    channel = None
    generator = torch.Generator().manual_seed(_SEED)
    for w1, w2 in _experts(weights):
        experts, hidden, inner = w2.shape
        if channel is None:
            channel = int(torch.randint(hidden, (), generator=generator))
        each = torch.arange(experts)
        row = torch.randint(inner, (experts,), generator=generator)
        w2[:, channel] *= factor
        w1[each, inner + row] *= factor
        w2[each, :, row] /= factor
    for name, t in weights.items():
        if name.endswith("norm.weight") and t.shape == (hidden,):
            t[channel] /= factor
    checkpoint.save(target / "checkpoints", 0, {**state, "step": 0, "model": weights}, keep=1)
    return outliers(weights)


def outliers(weights: Weights) -> dict[str, float]:
    """Largest over median norm of the rows of an expert's W1 and W2: the median expert's."""
    found: dict[str, list[torch.Tensor]] = {"w1": [], "w2": []}
    for pair in _experts(weights):
        for name, w in zip(found, pair, strict=True):
            norms = w.float().norm(dim=-1)
            found[name].append(norms.amax(-1) / norms.median(-1).values)
    return {name: float(torch.cat(ratios).median()) for name, ratios in found.items()}


def _weights(run: Path) -> Weights:
    return checkpoint.load_latest(run / "checkpoints")["model"]


def _experts(weights: Weights) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """W1 (E, 2I, H), gate before up, and W2 (E, H, I) of every layer."""
    for name, w1 in weights.items():
        if name.endswith(".c_fc.weight"):
            yield w1, weights[name.replace(".c_fc.", ".c_proj.")]


# --- errors ---------------------------------------------------------------------------------------
def capture(config: TrainConfig, cache: Path) -> list[Weights]:
    """X, dO, ids, scores, W1 and W2 of every layer in the first step of a run, in bf16.

    The model computes in bf16, or in fp32 if the run does so.
    """
    device = parallel.start(config.device).device
    given = load_config(Path(config.init_from))
    model = Decoder(given.model, config.backend).to(device)
    checkpoint.restore_weights(
        checkpoint.load_latest(Path(config.init_from) / "checkpoints"), model
    )
    text = corpus.prepare(config, cache)
    batches = Batches(text.tokens("train"), given.model.context, config.batch, config.seed)
    inputs, targets = (t[: config.micro_batch].to(device) for t in batches.step(0))
    found: list[Weights] = [{} for _ in model.blocks]
    with contextlib.ExitStack() as hooks:
        for block, layer in zip(model.blocks, found, strict=True):
            hooks.enter_context(_captured(block, layer))
        with torch.autocast(device.type, torch.bfloat16, enabled=given.is_autocast):
            loss, _ = model(inputs, targets, loss_chunk=config.loss_chunk)
        loss.backward()
    return [{name: t.cpu() for name, t in layer.items()} for layer in found]


@contextlib.contextmanager
def _captured(block: nn.Module, layer: Weights) -> Iterator[None]:
    def after(moe, given, results) -> None:
        x = given[0].detach().flatten(0, -2)
        with torch.no_grad():
            scores, ids = topk_scores(moe.router(x), moe.top_k)
        rounded = {"x": x, "scores": scores, "w1": moe.c_fc.weight, "w2": moe.c_proj.weight}
        layer.update({name: t.detach().bfloat16() for name, t in rounded.items()}, ids=ids.long())
        results[0].register_hook(backward)

    def backward(dout: torch.Tensor) -> None:
        layer["dout"] = dout.flatten(0, -2).bfloat16()

    handle = block.get_submodule("moe").register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def measure_here(layers: list[Weights], variants: Sequence[str], device: str) -> Records:
    """Errors of the package that trains. One that fails is no reason not to fine-tune."""
    for variant in variants:
        try:
            found = layer_errors.errors(layers, variant, device)
        except Exception as error:
            yield _failed_record(THIS, f"{variant}: {type(error).__name__}: {error}")
        else:
            yield _error_record(THIS, found)


def measure(
    label: str, source: Path, layers: list[Weights], variants: Sequence[str], path: Path
) -> Records:
    """Errors of the package in `source`, which may be another commit's: in a process of its own."""
    torch.save(layers, path)
    command = [sys.executable, str(_SCRIPT), str(source), str(path), *variants]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    path.unlink()
    yield from (_error_record(label, json.loads(line)) for line in result.stdout.splitlines())
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        yield _failed_record(label, lines[-1])


def _error_record(label: str, found: dict[str, Any]) -> dict[str, Any]:
    norms = {name: round(e["norm"], 4) for name, e in found["together"].items()}
    print(f"Errors of {label}, {found['variant']}: {norms}", flush=True)
    run = f"{label}, {found['variant']}"
    return {"experiment": ERRORS, "run": run, "source": label, "finished": True, **found}


def _failed_record(label: str, why: str) -> dict[str, Any]:
    print(f"FAILED errors of {label}: {why}", flush=True)
    return {"experiment": ERRORS, "run": label, "source": label, "failed": why}


def _variant_of_experts(variant: str) -> str:
    """What `experts` knows of a variant of a training."""
    settings = training.settings_of(variant)
    precision = "fp8" if settings["precision"] == "fp8" else "autocast"
    return precision + (f"+memory={settings['memory']}" if "memory" in settings else "")
