"""A small layer that keeps its weights in FP8, and its tokens."""

from typing import Any

import torch

from sonicmoe import MoE


def layer(**options: Any) -> MoE:
    torch.manual_seed(0)
    common: dict[str, Any] = {"precision": "fp8", "dtype": torch.bfloat16}
    return MoE(4, 2, 32, 16, **common | {"cache_fp8_weights": True} | options)


def tokens() -> torch.Tensor:
    return torch.randn(12, 32, generator=torch.Generator().manual_seed(1)).bfloat16()


def fresh(moe: MoE) -> torch.Tensor:
    """The output of a layer that quantizes in every call."""
    other = layer(cache_fp8_weights=False)
    other.load_state_dict(moe.state_dict())
    return other(tokens())[0]
