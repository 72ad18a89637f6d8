"""Operators of token rounding: a choice (T, K) in, the list of kept pairs out."""

from functools import cache

import torch

from ..reference import token_rounding as reference
from ..reference.token_rounding import most_rows
from .register import operator


@cache
def _triton():
    from ..launch import token_rounding

    return token_rounding


def _fake(values, ids, tile, subroutine):
    tokens, experts = values.shape
    slots = most_rows(tokens, experts, ids.shape[1], tile, subroutine)

    def new(size, dtype=torch.int32):
        return values.new_empty((size,), dtype=dtype)

    pairs = new(slots), new(slots), new(slots, torch.promote_types(values.dtype, torch.float32))
    return *pairs, new(tokens + 1), new(experts), new(experts)


@operator(
    "round_tokens(Tensor scores, Tensor ids, int tile, str subroutine, Tensor? uniform, "
    "str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=lambda scores, ids, tile, subroutine, uniform, backend: _fake(
        scores, ids, tile, subroutine
    ),
)
def round_tokens(scores, ids, tile, subroutine, uniform, backend):
    """pair_expert, pair_token, pair_score (S,), token_start (T+1,), rows (E,), chosen (E,).

    Pairs come ordered by token, then by expert; unused ones have expert −1, token T and score 0.
    `rows` are those of each expert after rounding, `chosen` those of the choice. Scores are at
    least 0; ties between them go to the lower token.
    """
    if backend == "torch":
        return reference.round_tokens(scores, ids, tile, subroutine, uniform)
    return _triton().round_tokens(scores, ids, tile, subroutine, uniform)


@operator(
    "round_logits(Tensor logits, Tensor ids, bool normalize, int tile, str subroutine, "
    "Tensor? uniform, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=lambda logits, ids, normalize, tile, subroutine, uniform, backend: _fake(
        logits, ids, tile, subroutine
    ),
)
def round_logits(logits, ids, normalize, tile, subroutine, uniform, backend):
    """`round_tokens` of the softmax of the logits, or of that over its sum among the chosen."""
    if backend == "torch":
        scores = reference.softmax_scores(logits, ids if normalize else None)
        return reference.round_tokens(scores, ids, tile, subroutine, uniform)
    return _triton().round_logits(logits, ids, normalize, tile, subroutine, uniform)


@operator(
    "round_logits_backward(Tensor dscore, Tensor logits, Tensor? ids, Tensor pair_expert, "
    "Tensor token_start, str backend) -> Tensor",
    fake=lambda dscore, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
def round_logits_backward(dscore, logits, ids, pair_expert, token_start, backend):
    """dlogits (T, E) from the gradient (S,) of the kept pairs; ids where they normalised."""
    arguments = (dscore, logits, ids, pair_expert, token_start)
    if backend == "torch":
        return reference.round_logits_backward(*arguments)
    return _triton().round_logits_backward(*arguments)
