"""The router's logits and the scores of the top-K choice, as functions."""

import torch

from ..validation import check_floating, check_k, check_rank, resolve_backend
from .nodes import RouterLogits, TopK, router_gemm


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, *, fp32_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """X Wrᵀ, in fp32 if `fp32_logits`, and an alias of x for the experts.

    Both terms of dX are then accumulated by one GEMM.

    The alias must not be used outside of the layer.
    """
    plain = (
        torch.is_autocast_enabled(x.device.type)  # two dtypes for dX
        or x.dtype != weight.dtype
        or not torch.is_grad_enabled()
        or not (x.requires_grad or (fp32_logits and weight.requires_grad))  # else X is kept in fp32
    )
    if plain:
        return router_gemm(x, weight, fp32_logits), x
    logits, same = RouterLogits.apply(x, weight, fp32_logits)
    return logits, same if x.requires_grad else x


def topk_scores(
    logits: torch.Tensor,
    k: int,
    *,
    softmax_over_topk: bool = True,
    renormalize: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 scores (T, K), differentiable, and int32 ids (T, K) of the K largest logits.

    The softmax runs over a token's K choices, or over all experts before they are chosen; then
    `renormalize` makes a token's scores sum to one. Renormalised scores equal the softmax over the
    choices and are computed as such. Ties go to the lower id.
    """
    check_rank("logits", logits, "(T, E)")
    check_floating("logits", logits)
    check_k(k, logits.shape[1])
    backend = resolve_backend(backend, logits)
    softmax_over_topk = softmax_over_topk or renormalize
    return TopK.apply(logits, k, softmax_over_topk, backend)
