"""Predict memory per GPU, communication and tokens per day of a model on many GPUs.

The prediction uses arithmetic and a few efficiencies, measured where possible. It prints all
assumptions and the effect of changing some of them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bench.tables import table
from ..errors import bad_argument
from ..layer.memory import memory_policy
from . import accounting
from .backends import LAYER_BACKENDS
from .config import PRECISIONS, ModelConfig, TrainConfig, parse_assignments
from .hardware import GPUS, Gpu, gpu
from .model import check_layer
from .parallel import check_shares
from .presets import PRESETS, preset
from .progress import count as counted
from .progress import human, human_bytes

PAPER = (213e9, "7B", "H100", 64)  # tokens per day, model, GPU, how many


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the data sheet's rates that kernels and links reach.

    Those of grouped and dense GEMMs come from benchmarks/results/nvidia-h200, which a test checks.
    Those of attention refer to 6·T·S·H FLOPs; a deterministic flash backward pass computes 5 GEMMs
    for every 2 forward, on kernels made for an earlier GPU.
    """

    grouped: float = 0.674  # grouped GEMMs of the layer, forward and backward
    empty: float = 0.75  # time of a padding row relative to another row
    dense: float = 0.62  # dense GEMMs: the mean of nine shapes
    attention_64: float = 0.20  # heads of less than 128
    attention_128: float = 0.27
    copy: float = 0.90  # 4.3 of 4.8 TB/s on an H200
    uncovered: float = 0.47  # share of the layer's traffic that its GEMMs do not hide
    layer_fixed: float = 0.16e-3  # seconds per layer: router, top-K, permutation, launches
    node: float = 0.80
    network: float = 0.85
    overlap: float = 0.80  # share of the computation that may hide FSDP's transfers

    def attention(self, head_dim: int) -> float:
        return self.attention_128 if head_dim >= 128 else self.attention_64


@dataclass(frozen=True, slots=True)
class Layout:
    gpus: int
    shard: int  # GPUs that share one copy of the weights (FSDP)
    expert_parallel: int  # GPUs that share the experts of a layer
    accumulate: int  # micro-batches per step

    def __post_init__(self) -> None:
        for name in ("gpus", "shard", "expert_parallel", "accumulate"):
            if getattr(self, name) < 1:
                raise bad_argument(name, "at least 1", getattr(self, name), "Use 1 for none.")
        if self.gpus % self.shard:
            divisor = f"a divisor of gpus = {self.gpus}"
            raise bad_argument("shard", divisor, self.shard, "Change one.")
        if self.shard % self.expert_parallel:
            divisor = f"a divisor of shard = {self.shard}"
            remedy = "The GPUs that share experts also share the rest of the weights."
            raise bad_argument("expert_parallel", divisor, self.expert_parallel, remedy)


@dataclass(frozen=True, slots=True)
class Prediction:
    memory: accounting.Memory
    compute: dict[str, float]  # seconds of one micro-batch, by part
    transfers: dict[str, float]  # seconds of one step, by kind
    exposed: float  # seconds of transfers that nothing hides
    optimizer: float
    step: float
    tokens_per_step: int

    @property
    def tokens_per_day(self) -> float:
        return self.tokens_per_step / self.step * 86400


def moe_seconds(m: ModelConfig, tokens: int, device: Gpu, eff: Efficiency) -> float:
    """One layer, forward and backward: all of its GEMMs, ten passes over rows of H, six over Z,
    three over all weights."""
    return eff.layer_fixed + _part_of_layer(m, tokens, device, eff, 18, passes=(10, 6, 9))


def moe_recomputed_seconds(m: ModelConfig, tokens: int, device: Gpu, eff: Efficiency) -> float:
    """What a checkpoint runs again: the routing (a guess: half of `layer_fixed`) and up."""
    return eff.layer_fixed / 2 + up_seconds(m, tokens, device, eff)


def up_seconds(m: ModelConfig, tokens: int, device: Gpu, eff: Efficiency) -> float:
    """The GEMM that reads X and W1, writes Z and A; memory=recompute runs it twice."""
    return _part_of_layer(m, tokens, device, eff, 4, passes=(1, 1.5, 2))


def _part_of_layer(
    m: ModelConfig, tokens: int, device: Gpu, eff: Efficiency, flops: int, passes: Sequence[float]
) -> float:
    """GEMMs with padding, `flops` per row and element of H·I, and the traffic that they do not
    hide: passes over rows of H, over Z, and over E·H·I weights."""
    rows_of_h, rows_of_z, weights = passes
    rows = tokens * m.experts_per_token
    padding = 1 + eff.empty * 64 * m.num_experts / rows  # half a tile of 128 rows per expert
    matrix = m.hidden_size * m.intermediate_size
    gemms = flops * rows * matrix * padding / (eff.grouped * device.half)
    elements = rows * (rows_of_h * m.hidden_size + rows_of_z * 2 * m.intermediate_size)
    traffic = eff.uncovered * 2 * (elements + weights * m.num_experts * matrix)
    return gemms + traffic / (eff.copy * device.bandwidth)


def predict(config: TrainConfig, device: Gpu, layout: Layout, eff: Efficiency) -> Prediction:
    m = config.model
    tokens = config.micro_batch * m.context
    compute = _compute(config, tokens, device, eff)
    if config.recompute:
        outside = ("head and loss", "casts of weights and gradients")
        blocks = sum(s for part, s in compute.items() if part not in outside)
        moe = compute["MoE layers"]
        again = m.num_layers * moe_recomputed_seconds(m, tokens, device, eff)
        compute["recomputation"] = (blocks - moe) / 3 + again  # forward is a third of a step
    if memory_policy(config.memory).recompute:
        compute["recomputation of Z"] = m.num_layers * up_seconds(m, tokens, device, eff)
    if not config.is_autocast or layout.shard > 1:  # FSDP casts each GPU's own shard
        del compute["casts of weights and gradients"]
    busy = layout.accumulate * sum(compute.values())
    transfers = _transfers(config, tokens, device, layout, eff)
    to_all = transfers["expert all-to-all"]
    hideable = sum(transfers.values()) - to_all
    exposed = to_all + max(0.0, hideable - eff.overlap * busy)
    mine = accounting.parameters(m).total / layout.shard
    # The state read and written once; before it gradients are read for their norm and scaled.
    moved = (2 * accounting.STATE_BYTES[config.precision] + 12) * mine
    optimizer = moved / (eff.copy * device.bandwidth)
    return Prediction(
        memory=accounting.memory(config, layout.shard),
        compute=compute,
        transfers=transfers,
        exposed=exposed,
        optimizer=optimizer,
        step=busy + exposed + optimizer,
        tokens_per_step=layout.gpus * layout.accumulate * tokens,
    )


def _compute(config: TrainConfig, tokens: int, device: Gpu, eff: Efficiency) -> dict[str, float]:
    m = config.model
    width = m.num_heads * m.head_dim
    dense, copy = eff.dense * device.half, eff.copy * device.bandwidth
    projections = 2 * m.hidden_size * m.head_dim * (m.num_heads + m.num_kv_heads)
    elements = 2.5 * accounting.BLOCK_ELEMENTS * tokens * m.hidden_size  # written, read, read back
    logits = tokens * m.vocab_size
    count = accounting.parameters(m)
    # Weights are read in fp32 and written in bf16, gradients the other way; those of the experts
    # leave their GEMM in fp32.
    cast_bytes = 12 * (count.total - count.experts) + 8 * count.experts
    # Logits are written and read twice, their gradient is written and read by two GEMMs.
    head_bytes = 12
    attention = eff.attention(m.head_dim) * device.half
    return {
        "MoE layers": m.num_layers * moe_seconds(m, tokens, device, eff),
        "attention GEMMs": m.num_layers * 6 * tokens * projections / dense,
        "attention": m.num_layers * 6 * tokens * m.context * width / attention,
        "norms, rotation, residuals": m.num_layers * 2 * elements / copy,
        "head and loss": 6 * logits * m.hidden_size / dense + head_bytes * logits / copy,
        "casts of weights and gradients": cast_bytes / copy,
    }


def _transfers(
    config: TrainConfig, tokens: int, device: Gpu, layout: Layout, eff: Efficiency
) -> dict[str, float]:
    """Rings: an all-gather moves every byte once through each GPU, an all-reduce twice."""
    m = config.model
    count = accounting.parameters(m)
    gathered = count.total - count.experts + count.experts / layout.expert_parallel
    group = layout.shard
    share = (group - 1) / group
    link = _collective_link(group, device, eff)
    gradient = 2 if config.bf16_weights else 4
    copies = layout.gpus // layout.shard
    across = eff.network * device.network_link if layout.gpus > device.per_node else link
    sent = 2 * tokens * m.experts_per_token * m.hidden_size
    away = (layout.expert_parallel - 1) / layout.expert_parallel
    expert_link = (
        eff.node * device.node_link
        if layout.expert_parallel <= device.per_node
        else eff.network * device.network_link
    )
    return {
        # Forward and again backward, for every micro-batch.
        "FSDP gather of weights": layout.accumulate * 2 * 2 * gathered * share / link,
        "FSDP scatter of gradients": gradient * gathered * share / link,
        "all-reduce between copies": 2
        * gradient
        * count.total
        / group
        * (copies - 1)
        / copies
        / across,
        # There and back, forward and backward.
        "expert all-to-all": layout.accumulate * m.num_layers * 4 * sent * away / expert_link,
    }


def _collective_link(group: int, device: Gpu, eff: Efficiency) -> float:
    """Bytes/s of a ring over `group` GPUs: beyond a node, all its network cards carry it."""
    node = eff.node * device.node_link
    if group <= device.per_node:
        return node
    return min(node, eff.network * device.network_link * device.per_node)


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
    attention = replace(eff, attention_64=0.4, attention_128=0.4)
    changed = {
        "as assumed": (config, eff),
        "no transfer is hidden": (config, replace(eff, overlap=0.0)),
        recompute: (config.override({"recompute": not config.recompute}), eff),
        "attention reaches 40% of peak": (config, attention),
        "all GEMMs reach 50% of peak": (config, replace(eff, grouped=0.5, dense=0.5)),
        "none of the layer's traffic is hidden": (config, replace(eff, uncovered=1.0)),
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
    m = config.model
    lines = [
        f"{config.micro_batch} sequences of {m.context} per micro-batch, {layout.accumulate} "
        f"micro-batch(es) per step; precision {config.precision} ({PRECISIONS[config.precision]}); "
        f"recompute={str(config.recompute).lower()}",
        f"{layout.shard} GPUs share a copy of the weights (FSDP2), {layout.gpus // layout.shard} "
        f"copies; experts shared by {layout.expert_parallel}",
        f"{device.name} by its data sheet: {human(device.half)} bf16 FLOP/s dense, "
        f"{human(device.bandwidth)}B/s memory, {human(device.node_link)}B/s out of a GPU within "
        f"a node of {device.per_node}, {human(device.network_link)}B/s beyond",
        f"grouped GEMMs reach {eff.grouped:.0%} of peak, dense ones {eff.dense:.0%}, copies "
        f"{eff.copy:.0%} of bandwidth; {eff.uncovered:.0%} of the MoE layer's traffic is not "
        f"hidden by its GEMMs; {eff.layer_fixed * 1e3:.1f} ms per layer for the router and "
        "launches (fitted to nine shapes measured on one H200, within 2%; an H100 is assumed "
        "to reach the same fractions of its own data sheet)"
        + ("; FP8 is faster, but the times are those of bf16" * config.fp8_experts),
        f"attention reaches {eff.attention(m.head_dim):.0%} of peak (flash with a deterministic "
        "backward pass; from published rates of its forward pass on an H100, not measured)",
        "the head moves 12 bytes per logit (not measured)",
        f"links reach {eff.node:.0%} (node) and {eff.network:.0%} (network) of their speed; FSDP's "
        f"transfers overlap with at most {eff.overlap:.0%} of the computation, the all-to-all "
        "with none of it",
        "routing is even; half a tile of 128 rows per expert is padding, and a padding row takes "
        f"{eff.empty:.0%} of a row's time; a block keeps "
        f"{accounting.BLOCK_ELEMENTS} elements per token and unit of H outside the MoE layer",
        "the number of layers is chosen to reach the parameter count: the paper gives one layer",
    ]
    return "Assumptions:\n" + "\n".join(f"- {line}" for line in lines)


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
