"""Selective activation checkpointing: which operators keep their outputs instead of rerunning."""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..errors import bad_argument
from ..ops.registry import NAMESPACE

FORWARD = ("topk", "sigmoid_topk", "balance", "permute", "tiles", "up", "down")
_SUCCESSORS = {"combine": "down", "down_and_combine": "down", "fp8_up": "up"}


def save_operators(*names: str) -> Callable:
    """Return a `context_fn` for `torch.utils.checkpoint` that keeps the outputs of operators.

    Everything else is recomputed. Without names: all of `FORWARD`, so that each runs once.
    Bytes kept in bf16: topk 8·T·K, sigmoid_topk 12·T·K, balance 4·E, permute 12·R, up 2·R·(N+I),
    down 2·T·H.
    """
    for name in names:
        if name not in FORWARD:
            remedy = "Omit names for all."
            if name in _SUCCESSORS:
                remedy = f"It is part of {_SUCCESSORS[name]!r} now."
            raise bad_argument("names", f"operators among {', '.join(FORWARD)}", repr(name), remedy)
    operators = getattr(torch.ops, NAMESPACE)
    saved = {getattr(operators, name).default for name in names or FORWARD}
    return partial(create_selective_checkpoint_contexts, partial(_policy, saved))


def _policy(saved: set, ctx, op: torch._ops.OpOverload, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE
