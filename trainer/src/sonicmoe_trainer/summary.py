"""Summary of a run: its numbers, and a table of them."""

import json
import platform
from pathlib import Path
from typing import Any

import torch

from sonicmoe import MemoryPolicy
from sonicmoe.plugins import table

from . import accounting
from .backends import LAYER_BACKENDS
from .config import TrainConfig
from .loop import Trainer, peak_memory, share_of_peak
from .progress import count as counted
from .progress import human, human_bytes


def summarise(trainer: Trainer) -> dict[str, Any]:
    """The numbers of a finished or interrupted run."""
    c = trainer.config
    steady = trainer.steady[1:] or trainer.steady  # the first interval compiles and warms up
    seconds = sum(s for _, s in steady)
    rate = sum(t for t, _ in steady) / seconds if seconds else 0.0
    tokens = c.micro_batch * c.model.context
    kept = accounting.layer_bytes(c.model, tokens, c.precision, MemoryPolicy(c.memory))
    layers_at_once = 1 if c.recompute else c.model.num_layers
    count = accounting.parameters(c.model)
    device, ranks = trainer.world.device, trainer.world.size
    flops = rate * accounting.flops_per_token(c.model)
    return {
        "preset": c.preset,
        "router": c.model.router,
        "backend": c.backend,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "ranks": ranks,
        "parameters": count.total,
        "active_parameters": count.active,
        "steps": trainer.step,
        "tokens": trainer.step * c.tokens_per_step,
        "epochs": trainer.step * c.batch / trainer.batches.windows,
        "seconds": trainer.seconds,
        "first_loss": trainer.first_loss,
        "last_loss": trainer.last_loss,
        "validation_loss": trainer.validation_loss,
        "target_loss": c.target_loss,
        "tokens_per_second": rate,
        "flops_per_second": flops,
        "peak_share": share_of_peak(flops / ranks, device),
        "peak_memory": peak_memory(device),
        "kept_bytes": kept * layers_at_once if c.backend in LAYER_BACKENDS else None,
    }


def text(numbers: dict[str, Any]) -> str:
    """The final table."""
    n = numbers
    active = counted(n["active_parameters"])
    rows = [
        ("parameters (active)", f"{counted(n['parameters'])} ({active})"),
        ("tokens", f"{counted(n['tokens'])} ({n['epochs']:.2f} passes over the text)"),
        ("training time", f"{n['seconds']:.1f} s"),
        ("first loss", f"{n['first_loss']:.3f}"),
        ("last loss", f"{n['last_loss']:.3f}"),
        ("validation loss", f"{n['validation_loss']:.3f}"),
        ("tokens/s", counted(n["tokens_per_second"])),
        ("model FLOP/s", human(n["flops_per_second"])),
        ("peak memory", human_bytes(n["peak_memory"])),
    ]
    if n["kept_bytes"] is not None:
        rows.append(("kept for backward by the MoE layers", human_bytes(n["kept_bytes"])))
    return table([f"{numbers['preset']} on {numbers['device']}", "value"], rows)


def verdict(numbers: dict[str, Any]) -> tuple[bool, str]:
    """Whether the validation loss reached the goal, and the sentence that says so."""
    target, got = numbers["target_loss"], numbers["validation_loss"]
    if target is None:
        return True, ""
    if got <= target:
        return True, f"Goal reached: validation loss {got:.3f} ≤ {target:g}."
    return False, f"Goal missed: validation loss {got:.3f} > {target:g}."


def overfitting(numbers: dict[str, Any]) -> str:
    """A warning if the model overfits, else nothing."""
    gap = numbers["validation_loss"] - numbers["last_loss"]
    if numbers["epochs"] > 2 and gap > 0.5:
        return (
            f"The training loss is {gap:.2f} below the validation loss after "
            f"{numbers['epochs']:.1f} passes over the text: more text is needed, not more steps."
        )
    return ""


def write(folder: Path, numbers: dict[str, Any]) -> None:
    (folder / "summary.json").write_text(json.dumps(numbers, indent=1))
    (folder / "summary.md").write_text(text(numbers) + "\n")


def title(c: TrainConfig) -> tuple[str, str]:
    """Title and description of a run, for its plots."""
    m, count = c.model, accounting.parameters(c.model)
    head = f"{c.preset}: a Mixture-of-Experts language model of {counted(count.total)} parameters"
    line = (
        f"{m.num_layers} layers, {m.num_experts} experts, {m.experts_per_token} per token "
        f"({counted(count.active)} active parameters), router {m.router}; "
        f"{c.steps} steps of {counted(c.tokens_per_step)} tokens; text: {', '.join(c.data)}"
    )
    return head, line


def _processor() -> str:
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"
