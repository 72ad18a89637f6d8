"""The parameters of all experts as one object."""

from typing import NamedTuple

import torch

from .enums import ActivationType


class ExpertWeights(NamedTuple):
    """W1 (E, N, H), W2 (E, H, I), biases, the activation and the order of gate and up columns."""

    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    activation: ActivationType
    gate_up: str

    @property
    def num_experts(self) -> int:
        return self.w1.shape[0]

    def need_gradient(self) -> bool:
        return any(t is not None and t.requires_grad for t in self[:4])
