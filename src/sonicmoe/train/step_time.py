"""Predict the seconds of a training step: arithmetic, and efficiencies measured where possible."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import bad_argument
from ..layer.memory import memory_policy
from . import accounting
from .config import ModelConfig, TrainConfig
from .hardware import Gpu


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the data sheet's rates that kernels and links reach, and bytes that they move.

    Those of the MoE layer come from the layers in benchmarks/results/nvidia-h200; the others from
    training steps of the 7B model (`benchmarks/training_step.py --redraw` computes them from the
    kept records). Tests hold both against what was measured. Attention refers to 6·T·S·H FLOPs.
    """

    grouped: float = 0.674  # grouped GEMMs of the layer, forward and backward
    grouped_fp8: float = 1.24  # of the peak in bf16
    empty: float = 0.75  # time of a padding row relative to another row
    dense: float = 0.67  # GEMMs of q, k, v and o
    head: float = 0.78  # GEMMs of the head
    attention_64: float = 0.33  # heads of less than 128: from a step of the 1.4B model
    attention_128: float = 0.43  # the kernel that PyTorch chooses, cuDNN on Hopper
    repeatable: float = 0.72  # compiled FlexAttention relative to that
    repeatable_eager: float = 0.39  # FlashAttention-2 with its deterministic backward pass
    copy: float = 0.90  # 4.3 of 4.8 TB/s on an H200
    uncovered: float = 0.47  # share of the layer's traffic that its GEMMs do not hide
    uncovered_fp8: float = 0.54
    layer_fixed: float = 0.16e-3  # seconds per layer: router, top-K, permutation, launches
    block_bytes: float = 160.0  # per token and unit of H: norms, rotation, residuals, and gaps
    logit_bytes: float = 6.9  # of the loss; also the embedding
    node: float = 0.80
    network: float = 0.85
    overlap: float = 0.80  # share of the computation that may hide FSDP's transfers

    def attention(self, config: TrainConfig) -> float:
        wide = config.model.head_dim >= 128
        fastest = self.attention_128 if wide else self.attention_64
        if not config.deterministic:
            return fastest
        return fastest * (self.repeatable if config.compile else self.repeatable_eager)


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


def moe_seconds(
    m: ModelConfig, tokens: int, device: Gpu, eff: Efficiency, fp8: bool = False
) -> float:
    """One layer, forward and backward: all of its GEMMs, ten passes over rows of H, six over Z,
    three over all weights."""
    return eff.layer_fixed + _part_of_layer(m, tokens, device, eff, 18, (10, 6, 9), fp8)


def moe_recomputed_seconds(
    m: ModelConfig, tokens: int, device: Gpu, eff: Efficiency, fp8: bool = False
) -> float:
    """What a checkpoint runs again: the routing (a guess: half of `layer_fixed`) and up."""
    return eff.layer_fixed / 2 + up_seconds(m, tokens, device, eff, fp8)


def up_seconds(
    m: ModelConfig, tokens: int, device: Gpu, eff: Efficiency, fp8: bool = False
) -> float:
    """The GEMM that reads X and W1, writes Z and A; memory=recompute runs it twice."""
    return _part_of_layer(m, tokens, device, eff, 4, (1, 1.5, 2), fp8)


def _part_of_layer(
    m: ModelConfig,
    tokens: int,
    device: Gpu,
    eff: Efficiency,
    flops: int,
    passes: Sequence[float],
    fp8: bool,
) -> float:
    """GEMMs with padding, `flops` per row and element of H·I, and the traffic that they do not
    hide: passes over rows of H, over Z, and over E·H·I weights."""
    grouped = eff.grouped_fp8 if fp8 else eff.grouped
    uncovered = eff.uncovered_fp8 if fp8 else eff.uncovered
    rows_of_h, rows_of_z, weights = passes
    rows = tokens * m.experts_per_token
    padding = 1 + eff.empty * 64 * m.num_experts / rows  # half a tile of 128 rows per expert
    matrix = m.hidden_size * m.intermediate_size
    gemms = flops * rows * matrix * padding / (grouped * device.half)
    elements = rows * (rows_of_h * m.hidden_size + rows_of_z * 2 * m.intermediate_size)
    traffic = uncovered * 2 * (elements + weights * m.num_experts * matrix)
    return gemms + traffic / (eff.copy * device.bandwidth)


def predict(config: TrainConfig, device: Gpu, layout: Layout, eff: Efficiency) -> Prediction:
    m, fp8 = config.model, config.fp8_experts
    tokens = config.micro_batch * m.context
    compute = _compute(config, tokens, device, layout, eff)
    if config.recompute:
        outside = ("head and loss", "casts of weights and gradients", "adding up gradients")
        blocks = sum(s for part, s in compute.items() if part not in outside)
        moe = compute["MoE layers"]
        again = m.num_layers * moe_recomputed_seconds(m, tokens, device, eff, fp8)
        compute["recomputation"] = (blocks - moe) / 3 + again  # forward is a third of a step
    if memory_policy(config.memory).recompute:
        compute["recomputation of Z"] = m.num_layers * up_seconds(m, tokens, device, eff, fp8)
    if not config.is_autocast or layout.shard > 1:  # FSDP casts each GPU's own shard
        del compute["casts of weights and gradients"]
    busy = layout.accumulate * sum(compute.values())
    transfers = _transfers(config, tokens, device, layout, eff)
    to_all = transfers["expert all-to-all"]
    hideable = sum(transfers.values()) - to_all
    exposed = to_all + max(0.0, hideable - eff.overlap * busy)
    optimizer = _update_bytes(config, layout) / (eff.copy * device.bandwidth)
    return Prediction(
        memory=accounting.memory(config, layout.shard),
        compute=compute,
        transfers=transfers,
        exposed=exposed,
        optimizer=optimizer,
        step=busy + exposed + optimizer,
        tokens_per_step=layout.gpus * layout.accumulate * tokens,
    )


def _update_bytes(config: TrainConfig, layout: Layout) -> float:
    """Gradients read for their norm; then weights, gradients and moments read, and written."""
    count = accounting.parameters(config.model)
    if config.bf16_weights:
        per_weight = 2 + 8 + 6
    elif layout.shard == 1:  # PyTorch's optimizer also writes the clipped gradients
        per_weight = 4 + 16 + 16
    else:
        per_weight = 4 + 8 + 16 + 12
    moved = float(per_weight * count.total)
    if config.fp8_experts:  # quantizing weights in bf16 takes as long as 6.2 bytes of each
        moved += (6.2 if config.bf16_weights else 8.2) * count.experts
    return moved / layout.shard


def _compute(
    config: TrainConfig, tokens: int, device: Gpu, layout: Layout, eff: Efficiency
) -> dict[str, float]:
    """Seconds of the parts of a micro-batch."""
    m = config.model
    width = m.num_heads * m.head_dim
    dense, copy = eff.dense * device.half, eff.copy * device.bandwidth
    projections = 2 * m.hidden_size * m.head_dim * (m.num_heads + m.num_kv_heads)
    logits = tokens * m.vocab_size
    count = accounting.parameters(m)
    # Weights are read in fp32 and written in bf16, gradients the other way; those of the experts
    # leave their GEMM in fp32.
    cast_bytes = 12 * (count.total - count.experts) + 8 * count.experts
    # All but the first micro-batch read two gradients and write their sum.
    gradient = 2 if config.bf16_weights else 4
    added = 3 * gradient * count.total * (layout.accumulate - 1) / layout.accumulate
    attention = eff.attention(config) * device.half
    moe = moe_seconds(m, tokens, device, eff, config.fp8_experts)
    return {
        "MoE layers": m.num_layers * moe,
        "attention GEMMs": m.num_layers * 6 * tokens * projections / dense,
        "attention": m.num_layers * 6 * tokens * m.context * width / attention,
        "norms, rotation, residuals": m.num_layers
        * eff.block_bytes
        * tokens
        * m.hidden_size
        / copy,
        "head and loss": 6 * logits * m.hidden_size / (eff.head * device.half)
        + eff.logit_bytes * logits / copy,
        "casts of weights and gradients": cast_bytes / copy,
        "adding up gradients": added / copy,
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
