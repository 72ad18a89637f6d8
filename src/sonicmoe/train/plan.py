"""Predict memory per GPU, communication and tokens per day of a model on many GPUs.

The prediction uses arithmetic and a few efficiencies, measured where possible. It prints all
assumptions and the effect of changing some of them.
"""

import argparse
from dataclasses import replace
from typing import Any

from ..errors import bad_argument
from ..layer.memory import memory_policy
from ..tools.tables import table
from . import accounting
from .backends import LAYER_BACKENDS
from .config import PRECISIONS, TrainConfig, parse_assignments
from .hardware import GPUS, Gpu, gpu
from .model import check_layer
from .parallel import check_shares
from .presets import PRESETS, preset
from .progress import count as counted
from .progress import human, human_bytes
from .step_time import Efficiency, Layout, predict

PAPER = (213e9, "7B", "H100", 64)  # tokens per day, model, GPU, how many


# --- what is printed ------------------------------------------------------------------------------
def report(config: TrainConfig, device: Gpu, layout: Layout, eff: Efficiency) -> str:
    p = predict(config, device, layout, eff)
    count = accounting.parameters(config.model)
    m = config.model
    fits = "fits" if p.memory.total <= device.memory else "does not fit"
    flops = accounting.flops_per_token(m) * p.tokens_per_step / p.step / layout.gpus
    rows = [
        ("weights, gradients, optimizer", human_bytes(p.memory.state)),
        ("kept for the backward pass", human_bytes(p.memory.kept)),
        ("head, loss", human_bytes(p.memory.head)),
        ("transient", human_bytes(p.memory.transient)),
        (f"memory per GPU ({fits} {human_bytes(device.memory)})", human_bytes(p.memory.total)),
        *((f"{part}, per micro-batch", _ms(s)) for part, s in p.compute.items()),
        *((f"{kind}, per step", _ms(s)) for kind, s in p.transfers.items()),
        ("transfers not hidden", _ms(p.exposed)),
        ("optimizer", _ms(p.optimizer)),
        ("step", _ms(p.step)),
        ("tokens per step", counted(p.tokens_per_step)),
        ("tokens/s per GPU", counted(p.tokens_per_step / p.step / layout.gpus)),
        ("model FLOP/s per GPU", f"{human(flops)} ({flops / device.half:.0%} of peak)"),
        ("tokens per day", counted(p.tokens_per_day)),
        (
            f"tokens per day, calibrated (× {_realised(eff):.2f})",
            counted(p.tokens_per_day * _realised(eff)),
        ),
    ]
    title = (
        f"{config.preset}: {counted(count.total)} parameters, {counted(count.active)} active; "
        f"{layout.gpus} {device.name}"
    )
    what_if = _sensitivities(config, device, layout, eff)
    assumed = _assumptions(config, device, layout, eff)
    return "\n\n".join([title, table(("prediction", "value"), rows), what_if, _paper(eff), assumed])


def alternatives(
    config: TrainConfig, device: Gpu, layout: Layout, eff: Efficiency
) -> dict[str, float]:
    """Tokens per day as assumed, and with one assumption changed."""
    recompute = "nothing is recomputed" if config.recompute else "blocks are recomputed"
    attention = replace(eff, attention_64=0.6, attention_128=0.6)
    slow = replace(eff, grouped=0.5, grouped_fp8=0.9, dense=0.5, head=0.5)
    traffic = replace(eff, uncovered=1.0, uncovered_fp8=1.0)
    changed = {
        "as assumed": (config, eff),
        "no transfer is hidden": (config, replace(eff, overlap=0.0)),
        recompute: (config.override({"recompute": not config.recompute}), eff),
        "attention reaches 60% of peak": (config, attention),
        "all GEMMs reach 50% of peak (90% in FP8)": (config, slow),
        "none of the layer's traffic is hidden": (config, traffic),
    }
    return {name: predict(c, device, layout, e).tokens_per_day for name, (c, e) in changed.items()}


def _sensitivities(config: TrainConfig, device: Gpu, layout: Layout, eff: Efficiency) -> str:
    found = alternatives(config, device, layout, eff)
    rows = [
        (name, counted(tokens), f"{tokens / found['as assumed'] - 1:+.0%}")
        for name, tokens in found.items()
    ]
    return table(("what if", "tokens per day", "change"), rows)


def papers_run(eff: Efficiency) -> dict[str, float]:
    """`alternatives` for the run that the paper reports, as far as the paper describes it."""
    _, model, name, gpus = PAPER
    config = preset(model).override({"precision": "autocast", "micro_batch": 6, "batch": 6})
    return alternatives(config, gpu(name), Layout(gpus, gpus, 1, 1), eff)


def _realised(eff: Efficiency) -> float:
    """The published tokens per day ÷ the prediction for that run."""
    return PAPER[0] / papers_run(eff)["as assumed"]


def _paper(eff: Efficiency) -> str:
    tokens, model, name, gpus = PAPER
    run = {what: counted(found) for what, found in papers_run(eff).items()}
    return (
        f"The paper reports {counted(tokens)} tokens per day for the {model} model on {gpus} "
        f"{name}s with FSDP2. This formula gives {run['as assumed']} there; "
        f"{run['no transfer is hidden']} if no transfer is hidden, {run['blocks are recomputed']} "
        f"if blocks are recomputed. The paper does not say which. The ratio, "
        f"{_realised(eff):.2f}, is only a calibrated factor: it also covers depth and context, "
        "which the paper does not give, transfers that slow down the GEMMs they overlap with, "
        "uneven routing, ranks that wait for each other, input, logging and host time."
    )


def _assumptions(config: TrainConfig, device: Gpu, layout: Layout, eff: Efficiency) -> str:
    """What was measured, and what was not."""
    m = config.model
    fp8, attention = config.fp8_experts, eff.attention(config)
    grouped = eff.grouped_fp8 if fp8 else eff.grouped
    uncovered = eff.uncovered_fp8 if fp8 else eff.uncovered
    measured = [
        f"grouped GEMMs reach {grouped:.0%} of the bf16 peak; {uncovered:.0%} of the MoE layer's "
        f"traffic is not hidden by them; {eff.layer_fixed * 1e3:.1f} ms per layer for the router "
        + ("and launches (five shapes in FP8, within 4%)" if fp8 else
           "and launches (nine shapes, within 2%)"),
        f"GEMMs of attention reach {eff.dense:.0%} of peak, those of the head {eff.head:.0%}; "
        f"copies {eff.copy:.0%} of bandwidth; norms, rotation and residuals move "
        f"{eff.block_bytes:.0f} bytes per token and unit of H, the loss {eff.logit_bytes:.0f} per "
        "logit; an update reads and writes its state once (the 7B model, compiled)",
    ]  # fmt: skip
    which = "the fastest kernel, cuDNN on Hopper"
    if config.deterministic:
        which = "FlexAttention" if config.compile else "FlashAttention-2"
        which += " with repeatable gradients"
    reached = f"attention reaches {attention:.0%} of peak ({which})"
    elements = accounting.block_elements(config)
    keeps = f"a block keeps {elements:g} elements per token and unit of H outside the MoE layer"
    assumed: list[str] = []
    (measured if config.compile else assumed).append(keeps)
    if m.head_dim == 128 or (m.head_dim == 64 and not config.deterministic):
        measured.append(reached)
    else:
        kernels = "128" if config.deterministic else "64 and 128"
        assumed.append(f"{reached}; measured only with heads of {kernels}")
    if not config.compile:
        assumed.append("norms, rotation and residuals take as long as compiled")
    if device.name != "H200":
        assumed.append(f"{device.name} reaches the same fractions of its own data sheet")
    if device.name == "A100":
        assumed.append("attention without cuDNN takes as long as with it")
    assumed += [
        f"links reach {eff.node:.0%} (node) and {eff.network:.0%} (network) of their speed; FSDP's "
        f"transfers overlap with at most {eff.overlap:.0%} of the computation, the all-to-all "
        "with none of it",
        "routing is even; half a tile of 128 rows per expert is padding, and a padding row takes "
        f"{eff.empty:.0%} of a row's time",
        "the number of layers is chosen to reach the parameter count: the paper gives one layer",
    ]
    given = [
        f"{config.micro_batch} sequences of {m.context} per micro-batch, {layout.accumulate} "
        f"micro-batch(es) per step; precision {config.precision} ({PRECISIONS[config.precision]}); "
        f"recompute={str(config.recompute).lower()}",
        f"{layout.shard} GPUs share a copy of the weights (FSDP2), {layout.gpus // layout.shard} "
        f"copies; experts shared by {layout.expert_parallel}",
        f"{device.name} by its data sheet: {human(device.half)} bf16 FLOP/s dense, "
        f"{human(device.bandwidth)}B/s memory, {human(device.node_link)}B/s out of a GPU within "
        f"a node of {device.per_node}, {human(device.network_link)}B/s beyond",
    ]
    lists = {"Given": given, "Measured on one H200": measured, "Assumed": assumed}
    return "\n\n".join(
        f"{title}:\n" + "\n".join(f"- {line}" for line in lines) for title, lines in lists.items()
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


# --- command line ---------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="7B", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--gpu", default="h100", help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--gpus", type=int, default=64, help="how many; default: 64")
    shared = "GPUs that share a copy of the weights; default: all"
    parser.add_argument("--shard", type=int, help=shared)
    experts = "GPUs that share the experts"
    parser.add_argument("--expert-parallel", type=int, help=f"{experts}; default: 1")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    share = "measured fraction of peak of the grouped GEMMs"
    parser.add_argument("--moe-efficiency", type=float, metavar="SHARE", help=share)
    keys = "micro_batch, recompute, context, …"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=keys)


def from_arguments(args: Any) -> str:
    values: dict[str, Any] = parse_assignments(args.set)
    # Sharded float32 weights fit; the preset's bf16 is for a single GPU.
    if args.gpus > 1 and "precision" not in values:
        values["precision"] = "autocast"
    if "micro_batch" in values and "batch" not in values:
        values["batch"] = values["micro_batch"]
    config = preset(args.preset).override(values)
    if config.backend not in LAYER_BACKENDS:
        ours, remedy = f"one of {', '.join(LAYER_BACKENDS)}", "The plan is for our layer."
        raise bad_argument("backend", ours, repr(config.backend), remedy)
    check_layer(config)
    device = gpu(args.gpu)
    device.check(memory_policy(config.memory), "fp8" if config.fp8_experts else None)
    shard = args.gpus if args.shard is None else args.shard
    ranks = config.expert_parallel if args.expert_parallel is None else args.expert_parallel
    layout = Layout(args.gpus, shard, ranks, args.accumulate)
    check_shares(config.model.num_experts, ranks)
    eff = Efficiency()
    if args.moe_efficiency is not None:
        if not 0 < args.moe_efficiency <= 1:
            raise bad_argument(
                "--moe-efficiency", "between 0 and 1", args.moe_efficiency, "0.6 is 60% of peak."
            )
        eff = replace(eff, grouped=args.moe_efficiency)
    return report(config, device, layout, eff)
