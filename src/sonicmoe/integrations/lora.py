"""LoRA on experts: `sonicmoe.experts` with adapters in PEFT's layout."""

import torch

from ..enums import ActivationType
from ..functional import experts
from ..layer.lora import LowRank
from ..layer.memory import KEEP, MemoryPolicy
from ..packed import PackedWeight

__all__ = ["LowRank", "lora_experts"]


def lora_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    w1: torch.Tensor | PackedWeight,
    w2: torch.Tensor | PackedWeight,
    lora1: LowRank | None,
    lora2: LowRank | None,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    activation: ActivationType = ActivationType.SWIGLU,
    gate_up: str = "interleaved",
    precision: str | None = None,
    memory: str | MemoryPolicy = KEEP,
    backend: str | None = None,
) -> torch.Tensor:
    """`sonicmoe.experts` with LoRA on frozen weights; gradients for x, scores and the adapters.

    None instead of an adapter: no LoRA on that weight. Kept for the backward pass: x, Z, and
    X A1ᵀ and A A2ᵀ, r numbers per row each.
    """
    return experts(
        x,
        ids,
        scores,
        w1,
        w2,
        b1,
        b2,
        lora1=lora1,
        lora2=lora2,
        activation=activation,
        gate_up=gate_up,
        precision=precision,
        memory=memory,
        backend=backend,
    )
