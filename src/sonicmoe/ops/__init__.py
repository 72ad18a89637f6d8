"""Operators: every stage of the layer as `torch.ops.sonicmoe.*`, functional, for both backends."""

from .products import aggregate, down, down_backward, up, up_backward
from .routing import permute, tiles, topk, topk_backward
from .token_rounding import round_tokens

__all__ = [
    "aggregate",
    "down",
    "down_backward",
    "permute",
    "round_tokens",
    "tiles",
    "topk",
    "topk_backward",
    "up",
    "up_backward",
]
