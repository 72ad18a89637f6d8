"""The public functions: our own, and those of the published package."""

from typing import Unpack

import torch

from .enums import ActivationType
from .layer import prepare
from .layer.options import OptionArguments, Options
from .layer.run import run
from .layer.weights import ExpertWeights, Projection
from .packed import PackedWeight
from .routing.scores import router_logits, topk_scores
from .validation import check_integer, check_rank, check_router_dtype, check_shape, parse_activation


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    w1: torch.Tensor | PackedWeight,
    w2: torch.Tensor | PackedWeight,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    slot_token: torch.Tensor | None = None,
    token_start: torch.Tensor | None = None,
    **options: Unpack[OptionArguments],
) -> torch.Tensor:
    """Run every token through its experts and return their outputs summed with the scores.

    x (T, H); ids (T, K) in any order, where an id outside [0, E) is dropped: no compute, no
    output, no gradient; scores (T, K). W1 (E, 2I, H) — (E, I, H) for plain activations — and
    W2 (E, H, I) may be transposed views: no copy is made, gradients come in the same layout.
    Tokens with different numbers of experts: ids and scores (S,) and `slot_token` (S,), ascending,
    the token of each, dropped outside [0, T); `token_start` (T+1,), where it is known, saves
    finding each token's first slot. Values that break these rules raise a ValueError on a CPU; on a
    GPU, where reading them would wait for the device, they put NaN into the output.
    Returns (T, H). Kept for the backward pass: x, Z and about 20 bytes for each (token, expert). A
    `PackedWeight`, in 4 or 8 bits, is frozen and decoded just before each GEMM.

    The options are those of `sonicmoe.OptionArguments`: activation, gate_up, precision, memory,
    backend, fp8_weights, lora1 and lora2.
    """
    call = prepare.routed(
        x,
        ids,
        scores,
        _weights(w1, w2, b1, b2),
        Options.of(options),
        slot_token=slot_token,
        token_start=token_start,
    )
    return run(call)


def grouped_experts(
    rows: torch.Tensor,
    counts: torch.Tensor,
    w1: torch.Tensor | PackedWeight,
    w2: torch.Tensor | PackedWeight,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    **options: Unpack[OptionArguments],
) -> torch.Tensor:
    """Run the experts on rows that are already sorted by expert, such as an all-to-all's output.

    rows (R, H); counts (E,) rows of each expert, or None with `offsets` (E+1,) where expert e has
    rows [offsets[e], offsets[e+1]). Both, offsets (E,) then, leave gaps between the experts: expert
    e has rows [offsets[e], offsets[e] + counts[e]). Rows of no expert are neither read nor trusted;
    their output and gradient are zero. scores (R,), optional, multiply the rows of the result.
    Counts or offsets that do not fit R rows raise a ValueError on a CPU; on a GPU, where reading
    them would wait for the device, output and dX are NaN. The options are those of
    `experts`; `slices` of a `MemoryPolicy` has no effect without gaps, since no rows are combined.
    """
    weights = _weights(w1, w2, b1, b2)
    call = prepare.grouped(rows, counts, offsets, scores, weights, Options.of(options))
    return run(call)


def _weights(w1, w2, b1, b2) -> ExpertWeights:
    return ExpertWeights(Projection(w1, b1), Projection(w2, b2))


# --- of the published package ---------------------------------------------------------------------
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
    weights, options = _published(w1, w2, b1, b2, activation_type, concat_layout)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode_enabled):
        logits, x = router_logits(x, router_w)
        scores, ids = topk_scores(
            logits, K, softmax_over_topk=is_softmax_over_topk, renormalize=norm_topk_probs
        )
        call = prepare.routed(x, ids, scores, weights, options)
        return run(call), logits, call.counts


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
    weights, options = _published(w1, w2, b1, b2, activation_type, concat_layout)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode_enabled):
        token, order = token_indices.flatten().sort(stable=True)
        ids = expert_indices.flatten()[order]
        scores = router_scores.flatten()[order]
        call = prepare.routed(x, ids, scores, weights, options, slot_token=token)
        return run(call), call.counts


def _published(
    w1, w2, b1, b2, activation: ActivationType | str, concat_layout: bool
) -> tuple[ExpertWeights, Options]:
    check_rank("w1", w1, "(2I, H, E)")
    check_rank("w2", w2, "(H, I, E)")
    gate_up = "concatenated" if concat_layout else "interleaved"
    options = Options(parse_activation(activation), gate_up)
    return _weights(w1.permute(2, 0, 1), w2.permute(2, 0, 1), b1, b2), options
