"""Auxiliary losses: load balance and z-loss."""

from collections.abc import Callable

import torch

from ..validation import check_floating, check_rank, check_shape, resolve_backend
from .nodes import Balance


def auxiliary_loss(
    logits: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    balance: float = 1.0,
    z: float = 0.0,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return balance · `switch_loss` + z · `z_loss` in fp32.

    One pass over the logits. Kept for the backward pass: the logits.
    """
    check_rank("logits", logits, "(T, E)")
    check_floating("logits", logits)
    if counts is not None:
        check_shape("counts", counts, (logits.shape[1],), "(E,)")
        if all_reduce is not None:
            counts = all_reduce(counts.float())
    backend = resolve_backend(backend, logits)
    return Balance.apply(logits, counts, float(balance), float(z), backend)


def switch_loss(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Load-balancing loss of the Switch Transformer in fp32; 1 in perfect balance.

    E · Σ_e (share of the probability)_e · (share of the rows)_e. counts (E,) are the rows of each
    expert; `all_reduce` maps them to those of the global batch, which is then balanced as a whole.
    """
    return auxiliary_loss(logits, counts, all_reduce=all_reduce)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean of logsumexp(logits)² in fp32; 0 without tokens."""
    return auxiliary_loss(logits, None, balance=0.0, z=1.0)
