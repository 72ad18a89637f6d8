"""Routers map logits (T, E) to expert ids and scores: `MoE(router=…)` takes a name or an object."""

from collections.abc import Callable
from functools import partial

import torch

from ..errors import bad_argument
from .base import FunctionRouter, Router, Routing, check_router, check_routing
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


RouterLike = str | Router | Callable[[torch.Tensor], Routing]


def make_router(router: RouterLike, num_experts: int, k: int) -> Router:
    """Return the router with this name, or `router` itself after checking its E and K.

    A function of the logits (T, E) that returns a `Routing` becomes a router.
    """
    if isinstance(router, Router):
        check_router(router)
        if (router.num_experts, router.k) != (num_experts, k):
            raise bad_argument(
                "router",
                f"a router for {num_experts} experts and k = {k}",
                f"one for {router.num_experts} and {router.k}",
                "Build it with the sizes of the layer.",
            )
        return router
    if callable(router) and not isinstance(router, type):
        return FunctionRouter(router, num_experts, k)
    if not isinstance(router, str) or router not in ROUTERS:
        raise bad_argument(
            "router",
            f"one of {', '.join(ROUTERS)}, a sonicmoe.routing.Router or a function of the logits",
            repr(router),
            "A name uses the defaults; pass an object, not its class, to set options.",
        )
    return ROUTERS[router](num_experts, k)


def route(
    logits: torch.Tensor,
    k: int,
    router: RouterLike = "softmax_over_topk",
    *,
    backend: str | None = None,
) -> Routing:
    """Run a router on logits (T, E) and return its `Routing`: expert ids, scores and slot maps."""
    module = make_router(router, logits.shape[-1], k)
    r = module(logits, backend=backend)
    if not module._is_trusted():
        check_routing(r, module, logits)
    return r
