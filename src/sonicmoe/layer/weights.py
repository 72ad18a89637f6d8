"""The parameters of all experts as one object."""

from typing import Any, NamedTuple

import torch


class Projection(NamedTuple):
    """One of the two linear maps of every expert: W (E, out, in), a bias (E, out), and the LoRA
    factors A (E, r, in) and scale·B (E, out, r)."""

    weight: Any  # a tensor, or a packed weight; once it is checked, a `Weight`
    bias: torch.Tensor | None = None
    lora_a: torch.Tensor | None = None
    lora_b: torch.Tensor | None = None

    def need_gradient(self) -> bool:
        return any(t is not None and t.requires_grad for t in self)


class ExpertWeights(NamedTuple):
    """up is W1 (E, N, H), down is W2 (E, H, I)."""

    up: Projection
    down: Projection

    @property
    def num_experts(self) -> int:
        return self.up.weight.shape[0]

    def need_gradient(self) -> bool:
        return self.up.need_gradient() or self.down.need_gradient()
