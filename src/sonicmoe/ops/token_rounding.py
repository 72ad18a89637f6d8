"""Operators of token rounding: a choice (T, K) in, the list of kept pairs out."""

import torch
from torch import Tensor

from ..reference.token_rounding import most_rows
from .registry import operator

Rounded = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _rounded(values: Tensor, ids: Tensor, tile: int, subroutine: str) -> Rounded:
    tokens, experts = values.shape
    slots = most_rows(tokens, experts, ids.shape[1], tile, subroutine)

    def new(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return values.new_empty((size,), dtype=dtype)

    scores = new(slots, torch.promote_types(values.dtype, torch.float32))
    return new(slots), new(slots), scores, new(tokens + 1), new(experts), new(experts)


@operator("token_rounding")
def round_tokens(
    scores: Tensor,
    ids: Tensor,
    tile: int,
    subroutine: str,
    uniform: Tensor | None,
    backend: str,
) -> Rounded:
    """pair_expert, pair_token, pair_score (S,), token_start (T+1,), rows (E,), chosen (E,).

    Pairs come ordered by token, then by expert; unused ones have expert −1, token T and score 0.
    `rows` are those of each expert after rounding, `chosen` those of the choice. Scores are at
    least 0; ties between them go to the lower token.
    """
    return _rounded(scores, ids, tile, subroutine)


@operator("token_rounding")
def round_logits(
    logits: Tensor,
    ids: Tensor,
    normalize: bool,
    tile: int,
    subroutine: str,
    uniform: Tensor | None,
    backend: str,
) -> Rounded:
    """`round_tokens` of the softmax of the logits, or of that over its sum among the chosen."""
    return _rounded(logits, ids, tile, subroutine)


@operator("token_rounding")
def round_logits_backward(
    dscore: Tensor,
    logits: Tensor,
    ids: Tensor | None,
    pair_expert: Tensor,
    token_start: Tensor,
    backend: str,
) -> Tensor:
    """dlogits (T, E) from the gradient (S,) of the kept pairs; ids where they normalised."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
