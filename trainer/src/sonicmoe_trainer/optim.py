"""AdamW, its schedule, and one step of it with clipping."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sonicmoe.distributed import clip_grad_norm_, grad_norm

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


@torch.no_grad()
def step(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> torch.Tensor:
    """Clip the gradients to a norm of `clip`, update the weights and drop the gradients.

    Returns the norm before clipping. The optimizer divides each gradient as it reads it: a pass of
    its own over the gradients of 7B, 14 GB, would take 7 ms.
    """
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    if sharded and not isinstance(optimizer, StochasticAdamW):
        norm = clip_grad_norm_(model, clip)  # torch.optim divides no DTensor
    else:
        norm = grad_norm(model) if sharded else _local_norm(model)
        optimizer.grad_scale = (norm.float() / clip).clamp(min=1)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _local_norm(model: nn.Module) -> torch.Tensor:
    """Norm of all gradients, in fp32: in bfloat16 it would have 8 bits."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))
