"""Routers map logits (T, E) to expert ids and scores: `MoE(router=…)` takes a name or an object."""

from collections.abc import Callable
from functools import partial

import torch

from ..errors import bad_argument
from .base import Router, Routing
from .expert_choice import ExpertChoice
from .losses import auxiliary_loss, switch_loss, z_loss
from .sigmoid import Sigmoid
from .statistics import RouterStatistics, statistics
from .token_rounding import TokenRounding, round_tokens
from .topk import TopK

__all__ = [
    "ROUTERS",
    "ExpertChoice",
    "Router",
    "RouterStatistics",
    "Routing",
    "Sigmoid",
    "TokenRounding",
    "TopK",
    "auxiliary_loss",
    "make_router",
    "round_tokens",
    "route",
    "statistics",
    "switch_loss",
    "z_loss",
]

ROUTERS: dict[str, Callable[..., Router]] = {
    "softmax_over_topk": TopK,
    "topk_over_softmax": partial(TopK, softmax_over_topk=False),
    "topk_over_softmax_normalized": partial(TopK, softmax_over_topk=False, renormalize=True),
    "sigmoid": Sigmoid,
    "expert_choice": ExpertChoice,
    "token_rounding": TokenRounding,
}
"""Constructors of routers by the names that `MoE` and `route` accept."""


def make_router(router: str | Router, num_experts: int, k: int) -> Router:
    """Return the router with this name, or `router` itself after checking its E and K."""
    if isinstance(router, Router):
        if (router.num_experts, router.k) != (num_experts, k):
            raise bad_argument(
                "router",
                f"a router for {num_experts} experts and k = {k}",
                f"one for {router.num_experts} and {router.k}",
                "Build it with the sizes of the layer.",
            )
        return router
    if router not in ROUTERS:
        raise bad_argument(
            "router",
            f"one of {', '.join(ROUTERS)} or a sonicmoe.routing.Router",
            repr(router),
            "A name uses the defaults; pass an object to set options.",
        )
    return ROUTERS[router](num_experts, k)


def route(
    logits: torch.Tensor,
    k: int,
    router: str | Router = "softmax_over_topk",
    *,
    backend: str | None = None,
) -> Routing:
    """Run a router on logits (T, E) and return its `Routing`: expert ids, scores and slot maps."""
    return make_router(router, logits.shape[-1], k)(logits, backend=backend)
