"""The features of the layer, each declared once: the tests and docs/features.md are made of these.

A feature changes a `Case`, one call of the layer. Features of different groups can be combined,
unless `REASONS` says why not. Delete a line of `REASONS` once the pair works.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch

from sonicmoe import ActivationType, MemoryPolicy
from sonicmoe.layer.memory import KEEP


@dataclass(frozen=True)
class Case:
    """One call of the layer. `frozen` are the names of tensors without a gradient."""

    entry: str = "experts"
    dtype: torch.dtype = torch.bfloat16
    precision: str | None = None
    kept_fp8_weights: bool = False
    nf4: bool = False  # the weights have values of NF4, and no gradient
    packed: bool = False
    memory: MemoryPolicy = KEEP
    bias: bool = False
    lora: bool = False
    activation: ActivationType = ActivationType.SWIGLU
    gate_up: str = "interleaved"
    frozen: tuple[str, ...] = ()
    main_grad: bool = False
    autocast: bool = False
    checkpoint: bool = False
    compiled: bool = False
    cuda_graph: bool = False

    def computed_plainly(self) -> "Case":
        """The case whose results must have the same bits."""
        z = "keep" if self.memory.recompute else self.memory.z
        without = {"kept_fp8_weights", "packed", "checkpoint", "compiled", "cuda_graph"}
        changes: dict[str, Any] = {"memory": MemoryPolicy(z), **dict.fromkeys(without, False)}
        return replace(self, **changes)


@dataclass(frozen=True)
class Feature:
    """`implies` names features that come with it where no other one of their group is chosen."""

    name: str
    group: str
    words: str
    changes: dict[str, Any] = field(hash=False)
    implies: tuple[str, ...] = ()
    gpu: bool = False


OF_W1, OF_W2 = ("w1", "b1", "a1", "c1"), ("w2", "b2", "a2", "c2")  # a and c are LoRA factors

FEATURES = [
    Feature("fp32", "precision", "data and weights in fp32", {"dtype": torch.float32}),
    Feature("fp8", "precision", '`precision="fp8"`', {"precision": "fp8"}),
    Feature("fp8_bf16_dw", "precision", '`precision="fp8_bf16_dw"`', {"precision": "fp8_bf16_dw"}),
    Feature(
        "kept FP8 weights", "kept FP8 weights", "`Fp8Weights`, or `cache_fp8_weights=True`",
        {"kept_fp8_weights": True}, implies=("fp8",),
    ),
    Feature("packed", "packed", "W1 and W2 in NF4: `Nf4`", {"nf4": True, "packed": True}),
    Feature("e4m3", "memory", '`memory="e4m3"`', {"memory": MemoryPolicy("e4m3")}),
    Feature("recompute", "memory", '`memory="recompute"`', {"memory": MemoryPolicy("recompute")}),
    Feature("slices", "memory", "`memory=MemoryPolicy(slices=2)`",
            {"memory": MemoryPolicy(slices=2)}),
    Feature("FP8 weights again", "memory", '`memory=MemoryPolicy(weights="recompute")`',
            {"memory": MemoryPolicy(weights="recompute")}, implies=("fp8",)),
    Feature("biases", "biases", "`b1` and `b2`", {"bias": True}),
    Feature("LoRA", "LoRA", "adapters on W1 and W2, which are frozen", {"lora": True}),
    Feature("gelu", "activation", "an activation without a gate",
            {"activation": ActivationType.GELU}),
    Feature("clamped", "activation", "the clamped SwiGLU of gpt-oss",
            {"activation": ActivationType.SWIGLU_CLAMPED}),
    Feature("concatenated", "gate_up", '`gate_up="concatenated"`', {"gate_up": "concatenated"}),
    Feature("W1 frozen", "frozen", "no gradient for W1, its bias and adapter", {"frozen": OF_W1}),
    Feature("W2 frozen", "frozen", "no gradient for W2, its bias and adapter", {"frozen": OF_W2}),
    Feature("only dX", "frozen", "no gradient for anything but X",
            {"frozen": (*OF_W1, *OF_W2, "scores", "router")}),
    Feature("MoE", "entry point", "`sonicmoe.MoE`", {"entry": "MoE"}),
    Feature("experts", "entry point", "`sonicmoe.experts`", {"entry": "experts"}),
    Feature("grouped_experts", "entry point", "`sonicmoe.grouped_experts`",
            {"entry": "grouped_experts"}),
    Feature("expert parallelism", "entry point", "`sonicmoe.distributed.experts`",
            {"entry": "expert parallelism"}),
    Feature("transformers", "entry point", "`sonicmoe.integrations.transformers`",
            {"entry": "transformers"}),
    Feature("PEFT", "entry point", "`sonicmoe.integrations.peft`", {"entry": "PEFT"},
            implies=("LoRA",)),
    Feature("main_grad", "main_grad", "weights with a `main_grad`", {"main_grad": True}),
    Feature("autocast", "autocast", "fp32 data and weights in `torch.autocast`, computed in bf16",
            {"autocast": True}),
    Feature("checkpoint", "checkpoint", "`torch.utils.checkpoint`", {"checkpoint": True}),
    Feature("compile", "compile", "`torch.compile`", {"compiled": True}),
    Feature("CUDA graph", "CUDA graph", "both passes captured", {"cuda_graph": True}, gpu=True),
]  # fmt: skip
BY_NAME = {feature.name: feature for feature in FEATURES}

HOST_WAITS = "The host waits for the number of rows that arrive (`RuntimeError` of CUDA)."

PARAMETERS = "The module trains dense parameters (`TypeError` of PyTorch)."
TARGETS = "PEFT finds no parameter in them (`ValueError` of PEFT)."

REASONS = {
    frozenset({"kept FP8 weights", "packed"}): "Every GEMM decodes them.",
    frozenset({"packed", "MoE"}): PARAMETERS,
    frozenset({"packed", "PEFT"}): TARGETS,
    frozenset({"kept FP8 weights", "fp32"}): "The weights are not in FP8.",
    frozenset({"expert parallelism", "CUDA graph"}): HOST_WAITS,
}

# What to know about pairs that work.
KEPT_BEFORE = "Call the layer once before, or refresh its FP8 weights."
NOTES = {
    frozenset({"packed", "main_grad"}): "No effect: packed weights are frozen.",
    frozenset({"kept FP8 weights", "compile"}): KEPT_BEFORE,
    frozenset({"kept FP8 weights", "CUDA graph"}): KEPT_BEFORE,
    frozenset({"slices", "grouped_experts"}): "No effect: no rows are combined.",
    frozenset({"gelu", "concatenated"}): "No effect: there is no gate.",
    frozenset({"MoE", "LoRA"}): "The adapters are PEFT's: call `use_lora_experts`.",
    frozenset({"LoRA", "main_grad"}): "Adapters have gradients in `.grad`.",
    frozenset({"PEFT", "main_grad"}): "Adapters have gradients in `.grad`.",
    frozenset({"expert parallelism", "compile"}): "The graph breaks, so not with `fullgraph=True`.",
}

# What a pair with a reason raises, and what the message has in it.
BAD_ARGUMENT: tuple[type[Exception], str] = (ValueError, r"^[\w.]+: expected ")
ERRORS: dict[str, tuple[type[Exception], str]] = {
    HOST_WAITS: (RuntimeError, "captur"),
    PARAMETERS: (TypeError, "cannot assign"),
    TARGETS: (ValueError, "target_parameters"),
}


def pairs() -> Iterator[tuple[Feature, Feature]]:
    for pair in combinations(FEATURES, 2):
        if pair[0].group != pair[1].group:
            yield pair


def with_implied(features: Iterable[Feature]) -> dict[str, Feature]:
    """The features and what they imply, by group."""
    chosen = {feature.group: feature for feature in features}
    for feature in tuple(chosen.values()):
        for name in feature.implies:
            chosen.setdefault(BY_NAME[name].group, BY_NAME[name])
    return chosen


def reasons(features: Iterable[Feature]) -> list[str]:
    """Why these features cannot be combined; empty if they can."""
    names = [feature.name for feature in with_implied(features).values()]
    found = [REASONS.get(frozenset(pair)) for pair in combinations(names, 2)]
    return [reason for reason in numbered() if reason in found] if any(found) else []


def numbered() -> list[str]:
    """Every reason once, in the order of `REASONS`."""
    return list(dict.fromkeys(REASONS.values()))


def case_of(features: Iterable[Feature]) -> Case:
    chosen = with_implied(features).values()
    return replace(Case(), **{k: v for feature in chosen for k, v in feature.changes.items()})
