"""The public functions: our own, from `layer`, and those of the published package."""

import torch

from .enums import ActivationType
from .layer import experts as experts
from .layer import experts_and_counts, router_logits, topk_scores
from .layer import grouped_experts as grouped_experts
from .validation import check_integer, check_rank, check_router_dtype, check_shape, parse_activation
from .weights import ExpertWeights


def moe_TC_softmax_topk_layer(
    x: torch.Tensor,
    router_w: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    K: int,
    stream_id: int | None = None,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    is_softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    concat_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The layer and its router; w1 (2I, H, E) and w2 (H, I, E) are views `weight.permute(1, 2, 0)`.

    Returns the output, the router's logits and the rows of each expert. Kernels run on the current
    stream; `stream_id` is accepted for callers of the published package.
    """
    check_rank("w1", w1, "(2I, H, E)")
    check_rank("x", x, "(T, H)")
    check_shape("router_w", router_w, (w1.shape[2], x.shape[1]), "(E, H)")
    check_router_dtype("router_w", router_w, x)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode_enabled):
        logits, x = router_logits(x, router_w)
        scores, ids = topk_scores(
            logits, K, softmax_over_topk=is_softmax_over_topk, renormalize=norm_topk_probs
        )
        weights = _weights(w1, w2, b1, b2, activation_type, concat_layout)
        out, counts = experts_and_counts(x, ids, scores, weights)
    return out, logits, counts


def moe_general_routing_inputs(
    x: torch.Tensor,
    router_scores: torch.Tensor,
    token_indices: torch.Tensor,
    expert_indices: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    E: int,
    stream_id: int | None = None,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer on a list of (token, expert, score) in any order; returns output and expert counts.

    Pairs with a token outside [0, T) or an expert outside [0, E) drop out. E is not used:
    the weights have it.
    """
    check_rank("w1", w1, "(2I, H, E)")
    for name, t in (("token_indices", token_indices), ("expert_indices", expert_indices)):
        check_integer(name, t)
        check_shape(name, t, tuple(router_scores.shape), "(pairs,), the shape of router_scores")
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode_enabled):
        token, order = token_indices.flatten().sort(stable=True)
        ids = expert_indices.flatten()[order]
        ids = torch.where((token >= 0) & (token < x.shape[0]), ids, -1)
        weights = _weights(w1, w2, b1, b2, activation_type, concat_layout)
        scores = router_scores.flatten()[order]
        return experts_and_counts(x, ids, scores, weights, slot_token=token)


def _weights(
    w1, w2, b1, b2, activation: ActivationType | str, concat_layout: bool
) -> ExpertWeights:
    check_rank("w1", w1, "(2I, H, E)")
    check_rank("w2", w2, "(H, I, E)")
    gate_up = "concatenated" if concat_layout else "interleaved"
    w1, w2, act = w1.permute(2, 0, 1), w2.permute(2, 0, 1), parse_activation(activation)
    return ExpertWeights(w1, w2, b1, b2, act, gate_up)
