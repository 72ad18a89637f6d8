"""AdamW and its schedule."""

import math

import torch
from torch import nn

from .adamw import StochasticAdamW
from .config import TrainConfig


def build(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Weight decay on matrices, none on the scales of the norms."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    scales = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    rate, betas = config.learning_rate, (config.beta1, config.beta2)
    if config.bf16_weights:
        return StochasticAdamW(groups, lr=rate, betas=betas, seed=config.seed)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then half a cosine down to the final ratio; `step` starts at 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    low = config.final_learning_rate_ratio
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
