"""Operators: every stage of the layer as `torch.ops.sonicmoe.*`, for both backends.

All functional but those that end in `_into`, which add a gradient to their first argument.
"""

from .grouped_gemm import (
    aggregate,
    down,
    down_backward,
    down_backward_into,
    up,
    up_backward,
    up_backward_into,
)
from .lora import adapted_down_backward, adapted_product, adapted_up, transposed
from .routing import (
    balance,
    balance_backward,
    count,
    permute,
    router_gradient_into,
    sigmoid_topk,
    sigmoid_topk_backward,
    tiles,
    topk,
    topk_backward,
)
from .token_rounding import round_logits, round_logits_backward, round_tokens

__all__ = [
    "adapted_down_backward",
    "adapted_product",
    "adapted_up",
    "aggregate",
    "balance",
    "balance_backward",
    "count",
    "down",
    "down_backward",
    "down_backward_into",
    "permute",
    "round_logits",
    "round_logits_backward",
    "round_tokens",
    "router_gradient_into",
    "sigmoid_topk",
    "sigmoid_topk_backward",
    "tiles",
    "topk",
    "topk_backward",
    "transposed",
    "up",
    "up_backward",
    "up_backward_into",
]
