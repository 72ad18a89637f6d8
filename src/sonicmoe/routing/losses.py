"""Losses that keep a router in balance and its logits small."""

from collections.abc import Callable

import torch
from torch.nn import functional as F


def switch_loss(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """E · Σ_e (share of the probability)_e · (share of the rows)_e, in fp32; 1 in perfect balance.

    counts (E,) are the rows of each expert. `all_reduce` maps them to those of the global batch,
    so that balance is asked of all ranks together and not of each one.
    """
    counts = counts.float()
    if all_reduce is not None:
        counts = all_reduce(counts)
    probability = F.normalize(logits.float().softmax(-1).sum(0), p=1, dim=0)
    return logits.shape[1] * (probability * F.normalize(counts, p=1, dim=0)).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean of logsumexp(logits)², in fp32; 0 without tokens."""
    return logits.float().logsumexp(-1).square().sum() / max(len(logits), 1)
