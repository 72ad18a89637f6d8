"""Scale on paper: memory a GPU, communication and tokens a day of a model on many GPUs.

A prediction from arithmetic and a few measured efficiencies. All of them are printed: a plan whose
assumptions one cannot see is worth nothing.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

from ..errors import bad_argument
from . import accounting
from .config import PRECISIONS, ModelConfig, TrainConfig, parse_assignments
from .hardware import GPUS, Gpu, gpu
from .presets import PRESETS, preset
from .progress import count as counted
from .progress import human, human_bytes
from .tables import table

PAPER = (213e9, "7B", "H100", 64)  # tokens a day, model, GPU, how many


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the data sheet that kernels and links reach."""

    grouped: float = 0.66  # grouped products of the layer: 650 of 989 TFLOP/s on an H200
    dense: float = 0.68  # plain products at these sizes
    attention: float = 0.42  # SDPA, forward and backward, causal
    copy: float = 0.90  # 4.3 of 4.8 TB/s on an H200
    uncovered: float = 0.60  # of the layer's traffic, what the products do not hide
    layer_fixed: float = 0.3e-3  # seconds a layer: router, top-K, permutation, launches
    node: float = 0.80
    network: float = 0.85
    overlap: float = 0.80  # share of the computation that may hide FSDP's transfers


@dataclass(frozen=True, slots=True)
class Layout:
    gpus: int
    shard: int  # GPUs that share one copy of the weights (FSDP)
    expert_parallel: int  # GPUs that share the experts of a layer
    accumulate: int  # micro-batches a step

    def __post_init__(self) -> None:
        for name in ("gpus", "shard", "expert_parallel", "accumulate"):
            if getattr(self, name) < 1:
                raise bad_argument(name, "at least 1", getattr(self, name), "Use 1 for none.")
        if self.gpus % self.shard:
            raise bad_argument(
                "shard", f"a divisor of gpus = {self.gpus}", self.shard, "Change one."
            )
        if self.shard % self.expert_parallel:
            raise bad_argument(
                "expert_parallel", f"a divisor of shard = {self.shard}", self.expert_parallel,
                "The GPUs that share experts also share the rest of the weights.",
            )  # fmt: skip


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


def moe_seconds(
    m: ModelConfig, tokens: int, device: Gpu, eff: Efficiency, element: int = 2
) -> float:
    """One layer, forward and backward: the products with their padding, and what they leave visible
    of the traffic: ten passes over the rows of H, six over Z."""
    rows = tokens * m.experts_per_token
    padding = 1 + 64 * m.num_experts / rows  # half a tile of 128 rows an expert
    products = (
        18 * rows * m.hidden_size * m.intermediate_size * padding / (eff.grouped * device.flops)
    )
    passes = element * rows * (10 * m.hidden_size + 6 * 2 * m.intermediate_size)
    return products + eff.uncovered * passes / (eff.copy * device.bandwidth) + eff.layer_fixed


def predict(config: TrainConfig, device: Gpu, layout: Layout, eff: Efficiency) -> Prediction:
    m = config.model
    tokens = config.micro_batch * m.context
    compute = _compute(config, tokens, device, eff)
    if config.recompute:
        blocks = sum(s for part, s in compute.items() if part != "head and loss")
        compute["recomputation"] = blocks / 3
    busy = layout.accumulate * sum(compute.values())
    transfers = _transfers(config, tokens, device, layout, eff)
    to_all = transfers["expert all-to-all"]
    hideable = sum(transfers.values()) - to_all
    exposed = to_all + max(0.0, hideable - eff.overlap * busy)
    mine = accounting.parameters(m).total / layout.shard
    moved = 2 * accounting.STATE_BYTES[config.precision] * mine
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
    dense, copy = eff.dense * device.flops, eff.copy * device.bandwidth
    projections = 2 * m.hidden_size * m.head_dim * (m.num_heads + m.num_kv_heads)
    elements = 2.5 * accounting.BLOCK_ELEMENTS * tokens * m.hidden_size  # written, read, read back
    logits = tokens * m.vocab_size
    return {
        "MoE layers": m.num_layers * moe_seconds(m, tokens, device, eff),
        "attention products": m.num_layers * 6 * tokens * projections / dense,
        "attention": m.num_layers * 6 * tokens * m.context * width / (eff.attention * device.flops),
        "norms, rotation, residuals": m.num_layers * 2 * elements / copy,
        "head and loss": 6 * logits * m.hidden_size / dense + 16 * logits / copy,
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
    gradient = 2 if config.precision == "bf16" else 4
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
        (f"memory a GPU ({fits} {human_bytes(device.memory)})", human_bytes(p.memory.total)),
        *((f"{part}, a micro-batch", _ms(s)) for part, s in p.compute.items()),
        *((f"{kind}, a step", _ms(s)) for kind, s in p.transfers.items()),
        ("transfers that nothing hides", _ms(p.exposed)),
        ("optimizer", _ms(p.optimizer)),
        ("a step", _ms(p.step)),
        ("tokens a step", counted(p.tokens_per_step)),
        ("tokens/s a GPU", counted(p.tokens_per_step / p.step / layout.gpus)),
        ("model FLOP/s a GPU", f"{human(flops)} ({flops / device.flops:.0%} of peak)"),
        ("tokens a day", counted(p.tokens_per_day)),
        ("… at the share the paper's run realised", counted(p.tokens_per_day * _realised(eff))),
    ]
    title = (
        f"{config.preset}: {counted(count.total)} parameters, {counted(count.active)} met by a "
        f"token; {layout.gpus} {device.name}"
    )
    return "\n\n".join(
        [title, table(("prediction", "value"), rows), _paper(eff),
         _assumptions(config, device, layout, eff)]
    )  # fmt: skip


def _realised(eff: Efficiency) -> float:
    """The published tokens a day over what this formula gives for that run."""
    tokens, model, name, gpus = PAPER
    config = preset(model).override({"precision": "autocast", "micro_batch": 6, "batch": 6})
    return tokens / predict(config, gpu(name), Layout(gpus, gpus, 1, 1), eff).tokens_per_day


def _paper(eff: Efficiency) -> str:
    tokens, model, name, gpus = PAPER
    share = _realised(eff)
    return (
        f"Held against the paper: {counted(tokens)} tokens a day for the {model} model on {gpus} "
        f"{name}s with FSDP2. This formula gives {counted(tokens / share)} there, so that run "
        f"realised {share:.0%} of it: the formula knows nothing of stragglers, input, logging, "
        "host-bound kernels or recomputation that the paper does not mention."
    )


def _assumptions(config: TrainConfig, device: Gpu, layout: Layout, eff: Efficiency) -> str:
    m = config.model
    lines = [
        f"{config.micro_batch} sequences of {m.context} a micro-batch, {layout.accumulate} "
        f"micro-batch(es) a step; precision {config.precision} ({PRECISIONS[config.precision]}); "
        f"recompute={str(config.recompute).lower()}",
        f"{layout.shard} GPUs share a copy of the weights (FSDP2), {layout.gpus // layout.shard} "
        f"copies; experts shared by {layout.expert_parallel}",
        f"{device.name} by its data sheet: {human(device.flops)} bf16 FLOP/s dense, "
        f"{human(device.bandwidth)}B/s memory, {human(device.node_link)}B/s out of a GPU within "
        f"{device.per_node} of a node, {human(device.network_link)}B/s beyond",
        f"grouped products reach {eff.grouped:.0%} of peak, plain ones {eff.dense:.0%}, attention "
        f"{eff.attention:.0%}, copies {eff.copy:.0%} of bandwidth; {eff.uncovered:.0%} of the MoE "
        f"layer's traffic is not hidden by its products; {eff.layer_fixed * 1e3:.1f} ms a layer "
        "for the router and launches (fitted to five shapes measured on one H200, within 12%; "
        "attention and plain products are assumed, not measured)",
        f"links reach {eff.node:.0%} (node) and {eff.network:.0%} (network) of their speed; FSDP's "
        f"transfers hide behind at most {eff.overlap:.0%} of the computation, the all-to-all "
        "behind none of it",
        "routing is even; padding is half a tile of 128 rows an expert; a block keeps "
        f"{accounting.BLOCK_ELEMENTS} elements a token and unit of H outside the MoE layer",
        "the number of layers is chosen to reach the parameter count: the paper gives one layer",
    ]
    return "Assumptions:\n" + "\n".join(f"- {line}" for line in lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


# --- command line ---------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="7B", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--gpu", default="H100", help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument(
        "--shard", type=int, help="GPUs that share a copy of the weights; default: all"
    )
    parser.add_argument(
        "--expert-parallel", type=int, default=1, help="GPUs that share the experts"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--moe-efficiency", type=float, metavar="SHARE",
                        help="measured share of peak of the grouped products")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="micro_batch, recompute, context, …")  # fmt: skip


def from_arguments(args: Any) -> str:
    values: dict[str, Any] = parse_assignments(args.set)
    # Sharded, float32 weights fit; the preset's bf16 is for one GPU alone.
    if args.gpus > 1 and "precision" not in values:
        values["precision"] = "autocast"
    if "micro_batch" in values and "batch" not in values:
        values["batch"] = values["micro_batch"]
    config = preset(args.preset).override(values)
    layout = Layout(args.gpus, args.shard or args.gpus, args.expert_parallel, args.accumulate)
    eff = Efficiency()
    if args.moe_efficiency is not None:
        if not 0 < args.moe_efficiency <= 1:
            raise bad_argument(
                "--moe-efficiency", "between 0 and 1", args.moe_efficiency, "0.6 is 60% of peak."
            )
        eff = replace(eff, grouped=args.moe_efficiency)
    return report(config, gpu(args.gpu), layout, eff)
