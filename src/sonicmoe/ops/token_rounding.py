"""The operator of token rounding: a choice (T, K) in, the list of kept pairs out."""

from functools import cache

import torch

from ..reference import token_rounding as reference
from ..reference.token_rounding import most_rows
from .register import operator


@cache
def _triton():
    from . import launch_token_rounding

    return launch_token_rounding


def _fake(scores, ids, tile, subroutine, uniform, backend):
    tokens, experts = scores.shape
    slots = most_rows(tokens, experts, ids.shape[1], tile, subroutine)

    def new(size, dtype=torch.int32):
        return scores.new_empty((size,), dtype=dtype)

    pairs = new(slots), new(slots), new(slots, scores.dtype)
    return *pairs, new(tokens + 1), new(experts), new(experts)


@operator(
    "round_tokens(Tensor scores, Tensor ids, int tile, str subroutine, Tensor? uniform, "
    "str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
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
