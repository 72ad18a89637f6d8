"""The public functions. A token's way through the layer reads from top to bottom in `_layer`."""

from collections.abc import Callable
from functools import partial

import torch

from . import autograd, ops
from .ahead import Layer, compile_ahead
from .enums import ActivationType
from .errors import bad_argument
from .main_grad import with_main_grad
from .ops.layout import dense_weight
from .permutation import Permutation
from .tuning import tile_height
from .validation import (
    check_choice,
    check_device,
    check_floating,
    check_integer,
    check_k,
    check_num_experts,
    check_rank,
    check_router_dtype,
    check_shape,
    check_weights,
    is_autocast,
    nan_unless,
    resolve_backend,
)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    slot_token: torch.Tensor | None = None,
    token_start: torch.Tensor | None = None,
    activation: ActivationType = ActivationType.SWIGLU,
    gate_up: str = "interleaved",
    backend: str | None = None,
) -> torch.Tensor:
    """Run every token through its experts and return their outputs summed with the scores.

    x (T, H); ids (T, K) in any order, where an id outside [0, E) is dropped: no compute, no
    output, no gradient; scores (T, K). W1 (E, 2I, H) — (E, I, H) for plain activations — and
    W2 (E, H, I) may be transposed views: no copy is made, gradients come in the same layout.
    Tokens with different numbers of experts: ids and scores (S,) and `slot_token` (S,), ascending,
    the token of each, dropped outside [0, T); `token_start` (T+1,), where it is known, saves
    finding each token's first slot. Values that break these rules raise a ValueError on a CPU; on a
    GPU, where reading them would wait for the device, they put NaN into the output.
    Returns (T, H). Kept for the backward pass: x, Z and about 20 bytes for each (token, expert).
    """
    ids, scores, token_start = check_slots(x, ids, scores, slot_token, token_start)
    run, _ = prepared_experts(
        x, ids, scores, w1, w2, b1, b2, slot_token, token_start, activation, gate_up, backend
    )
    return run()


def prepared_experts(
    x, ids, scores, w1, w2, b1, b2, slot_token, token_start, activation, gate_up, backend,
    *, logits: torch.dtype | None = None,
) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:  # fmt: skip
    """Everything before the GEMMs: validate, pick the backend, permute.

    Returns a function that runs the GEMMs, and the rows of each expert (E,). `logits` is the dtype
    of the router's logits where the auxiliary loss follows, to precompile it.
    """
    x, b1, b2 = _autocast(x, b1, b2)
    check_weights(x, w1, w2, b1, b2, activation, gate_up)
    if slot_token is None:
        check_choice(x, ids, scores)
    else:
        _check_pairs(x, ids, scores, slot_token, token_start)
    backend = resolve_backend(backend, x)
    if x.is_cuda and backend == "triton":
        _compile_ahead(x, ids, w1, w2, b1, b2, activation, gate_up, logits)
    permutation = permute(
        ids, w1.shape[0], slot_token=slot_token, tokens=x.shape[0], token_start=token_start,
        dtype=x.dtype, backend=backend,
    )  # fmt: skip
    assert permutation.counts is not None  # only rows that arrive sorted have none
    run = partial(_layer, x, scores, w1, w2, b1, b2, permutation, activation, gate_up, backend)
    return run, permutation.counts


def grouped_experts(
    rows: torch.Tensor,
    counts: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    activation: ActivationType = ActivationType.SWIGLU,
    gate_up: str = "interleaved",
    backend: str | None = None,
) -> torch.Tensor:
    """Run the experts on rows that are already sorted by expert, such as an all-to-all's output.

    rows (R, H); counts (E,) rows of each expert, or None with `offsets` (E+1,) where expert e has
    rows [offsets[e], offsets[e+1]). Both, offsets (E,) then, leave gaps between the experts: expert
    e has rows [offsets[e], offsets[e] + counts[e]). Rows of no expert are neither read nor trusted;
    their output and gradient are zero. scores (R,), optional, multiply the rows of the result.
    Counts or offsets that do not fit R rows raise a ValueError on a CPU; on a GPU, where reading
    them would wait for the device, output and dX are NaN.
    """
    rows, b1, b2 = _autocast(rows, b1, b2)
    check_weights(rows, w1, w2, b1, b2, activation, gate_up)
    num_experts = w1.shape[0]
    backend = resolve_backend(backend, rows)
    if counts is None and offsets is None:
        raise bad_argument("counts", "counts, offsets or both", "neither", "Pass counts (E,).")
    with_gaps = counts is not None and offsets is not None
    for name, t, size in (
        ("counts", counts, num_experts), ("offsets", offsets, num_experts + (not with_gaps))
    ):  # fmt: skip
        if t is not None:
            check_shape(name, t, (size,), "(E,)" if size == num_experts else "(E+1,)")
            check_integer(name, t)
            check_device(name, t, rows)
    if scores is not None:
        check_shape("scores", scores, (rows.shape[0],), "(R,)")
        check_floating("scores", scores)
        check_device("scores", scores, rows)
        scores = _score_dtype(scores, rows)
    if with_gaps:
        ids, scores = _expert_of_row(rows, counts, offsets, scores)
        return experts(
            rows, ids, scores, w1, w2, b1, b2,
            activation=activation, gate_up=gate_up, backend=backend,
        )  # fmt: skip
    start = offsets
    if start is None:
        start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    height = tile_height(rows.dtype, backend)
    start, tiles = ops.tiles(start, rows.shape[0], height, backend)
    maps = Permutation(
        row_token=None, row_slot=None, slot_row=None, expert_start=start, tiles=tiles,
        token_start=None, tile_height=height, counts=None,
    )  # fmt: skip
    return _layer(rows, scores, w1, w2, b1, b2, maps, activation, gate_up, backend)


def _expert_of_row(rows, counts, offsets, scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (R, 1), −1 in gaps, and scores (R, 1), NaN where the ranges of experts do not fit."""
    end = offsets + counts
    row = torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets.contiguous(), row, right=True) - 1
    inside = (expert >= 0) & (row < end[expert])
    fits = (counts >= 0).all() & (offsets >= 0).all() & (end <= rows.shape[0]).all()
    fits = fits & (end[:-1] <= offsets[1:]).all()
    if scores is None:
        scores = torch.ones_like(row, dtype=torch.promote_types(rows.dtype, torch.float32))
    scores = nan_unless(
        fits, scores,
        "offsets", f"ranges [offsets[e], offsets[e] + counts[e]) in order within {len(row)} rows",
        "others", "Sort the rows by expert.",
    )  # fmt: skip
    ids = torch.where(fits, torch.where(inside, expert, -1), 0)  # each row meets its NaN
    return ids[:, None], scores[:, None]


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, *, wide: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """X Wrᵀ, in fp32 if `wide`, and an alias of x for the experts, so that both terms of dX are
    accumulated by one GEMM.

    The alias must not be used outside of the layer.
    """
    plain = (
        torch.is_autocast_enabled(x.device.type)  # two dtypes for dX
        or x.dtype != weight.dtype
        or not torch.is_grad_enabled()
        or not (x.requires_grad or (wide and weight.requires_grad))  # else X is kept in fp32
    )
    if plain:
        return autograd.router_product(x, weight, wide), x
    logits, same = autograd.RouterLogits.apply(x, weight, wide)
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
    return autograd.TopK.apply(logits, k, softmax_over_topk, backend)


def permute(
    ids: torch.Tensor,
    num_experts: int,
    *,
    slot_token: torch.Tensor | None = None,
    tokens: int | None = None,
    token_start: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> Permutation:
    """Sort the (token, expert) pairs by expert, on the device.

    ids (T, K), or (S,) with `slot_token` (S,) ascending, the number of `tokens` and, where it is
    known, `token_start` (T+1,).
    """
    backend = resolve_backend(backend, ids)
    check_num_experts(num_experts)
    height = tile_height(dtype, backend)
    maps = ops.permute(ids, num_experts, slot_token, height, backend)
    if slot_token is not None and token_start is None:
        if tokens is None:
            raise bad_argument("tokens", "the number of tokens", tokens, "slot_token needs it.")
        every = torch.arange(tokens + 1, device=ids.device, dtype=slot_token.dtype)
        token_start = torch.searchsorted(slot_token, every, out_int32=True)
    row_token, row_slot, slot_row, expert_start, tiles, counts = maps
    return Permutation(
        row_token, row_slot, slot_row, expert_start, tiles, token_start, height, counts
    )


def _layer(x, scores, w1, w2, b1, b2, p: Permutation, activation, gate_up, backend) -> torch.Tensor:
    x, w1, w2 = x.contiguous(), dense_weight(w1), dense_weight(w2)  # once, not in each operator
    concatenated = gate_up == "concatenated"
    differentiable = (x, w1, w2, b1, b2, scores)
    keep_z = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in differentiable
    )
    if scores is not None:
        scores = _score_dtype(scores, x)
    z, a = autograd.Up.apply(
        x, w1, b1, p.row_token, p.slot_row, p.token_start, p.expert_start, p.tiles, p.tile_height,
        activation.value, concatenated, keep_z, backend,
    )  # fmt: skip
    return autograd.apply_then_rest(
        autograd.Down, z, a, scores, w2, b2, p.row_token, p.row_slot, p.slot_row, p.token_start,
        p.expert_start, p.tiles, x.shape[0], p.tile_height, activation.value, concatenated, backend,
    )  # fmt: skip


def _compile_ahead(x, ids, w1, w2, b1, b2, activation, gate_up, logits) -> None:
    """All kernels of a training step at once, where the first one would wait for each in turn."""
    training = torch.is_grad_enabled() and w1.requires_grad
    # A fake tensor is on a GPU that need not exist, and its kernels never run.
    if not training or torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        return
    experts, hidden, intermediate = w2.shape
    compile_ahead(
        x.get_device(),
        Layer(
            hidden, intermediate, experts, ids.shape[1] if ids.dim() == 2 else 0, x.dtype,
            activation, gate_up, (b1 is not None, b2 is not None),
            (w1.stride(2) != 1, w2.stride(2) != 1),
            (with_main_grad(w1) is not None, with_main_grad(w2) is not None), ids.dtype, logits,
            None if w1.dtype == x.dtype else w1.dtype,
        ),
    )  # fmt: skip


def _check_pairs(x, ids, scores, slot_token, token_start) -> None:
    check_rank("ids", ids, "(S,)")
    for name, t in (("scores", scores), ("slot_token", slot_token)):
        check_shape(name, t, tuple(ids.shape), "(S,), the shape of ids")
    check_floating("scores", scores)
    if token_start is not None:
        check_shape("token_start", token_start, (x.shape[0] + 1,), "(T+1,)")
    for name, t in (("ids", ids), ("slot_token", slot_token), ("token_start", token_start)):
        if t is not None:
            check_integer(name, t)
            check_device(name, t, x)
    check_device("scores", scores, x)


def check_slots(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    slot_token: torch.Tensor | None,
    token_start: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """ids, scores and token_start as `experts` may use them, their values checked too.

    Pairs whose token does not exist get the id −1. Where values do not fit, see `nan_unless`.
    """
    check_rank("x", x, "(T, H)")
    if slot_token is None:
        if token_start is not None:
            raise bad_argument(
                "token_start", "None without slot_token", "a tensor",
                "Pass both for tokens with different numbers of experts, or neither.",
            )  # fmt: skip
        check_choice(x, ids, scores)
        return ids, scores, None
    _check_pairs(x, ids, scores, slot_token, token_start)
    ids = torch.where((slot_token >= 0) & (slot_token < x.shape[0]), ids, -1)
    if token_start is not None:
        return ids, *_check_token_start(scores, slot_token, token_start)
    scores = nan_unless(
        (slot_token[1:] >= slot_token[:-1]).all(), scores,
        "slot_token", "tokens in ascending order", "another order", "Sort the pairs by token.",
    )  # fmt: skip
    return ids, scores, None


def _check_token_start(scores, slot_token, token_start) -> tuple[torch.Tensor, torch.Tensor]:
    """scores and token_start; NaN, and all slots the first token's, where they do not fit."""
    tokens, slots = token_start.shape[0] - 1, slot_token.shape[0]
    if tokens == 0:
        return scores, token_start
    slot = torch.arange(slots, device=slot_token.device)
    token = slot_token.clamp(0, tokens - 1)
    inside = (token_start[token] <= slot) & (slot < token_start[token + 1])
    absent = (slot_token < 0) | (slot_token >= tokens)
    fits = (inside | absent).all() & (token_start.diff() >= 0).all()
    scores = nan_unless(
        fits, scores,
        "token_start", "slots of token t in [token_start[t], token_start[t+1])",
        "others", "Leave token_start out: it is then found.",
    )  # fmt: skip
    first = torch.arange(tokens + 1, device=slot_token.device).clamp(max=1) * slots
    first = first.to(token_start.dtype)
    return scores, torch.where(fits, token_start, first)


def _score_dtype(scores: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return scores.to(wide)


def _autocast(x: torch.Tensor, *others: torch.Tensor | None) -> tuple:
    """In the dtype of autocast where it is enabled; like PyTorch's, it leaves float64 alone."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return x, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t is not None and is_autocast(t) else t for t in (x, *others))


# --- the published interface ----------------------------------------------------------------------
def moe_TC_softmax_topk_layer(
    x: torch.Tensor,
    router_w: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    K: int,
    stream_id: int | None = None,
    activation_type: ActivationType = ActivationType.SWIGLU,
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
        gate_up = "concatenated" if concat_layout else "interleaved"
        out, counts = _published(x, ids, scores, None, w1, b1, w2, b2, activation_type, gate_up)
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
    activation_type: ActivationType = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer on a list of (token, expert, score) in any order; returns output and expert counts.

    Pairs with a token outside [0, T) or an expert outside [0, E) drop out.
    """
    check_rank("w1", w1, "(2I, H, E)")
    for name, t in (("token_indices", token_indices), ("expert_indices", expert_indices)):
        check_integer(name, t)
        check_shape(name, t, tuple(router_scores.shape), "(pairs,), the shape of router_scores")
    if w1.shape[-1] != E:
        raise bad_argument(
            "E", f"the last dimension of w1 ({w1.shape[-1]})", E, "w1 is (2I, H, E)."
        )
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode_enabled):
        token, order = token_indices.flatten().sort(stable=True)
        ids = expert_indices.flatten()[order]
        ids = torch.where((token >= 0) & (token < x.shape[0]), ids, -1)
        gate_up = "concatenated" if concat_layout else "interleaved"
        scores = router_scores.flatten()[order]
        return _published(x, ids, scores, token, w1, b1, w2, b2, activation_type, gate_up)


def _published(x, ids, scores, slot_token, w1, b1, w2, b2, activation, gate_up):
    check_rank("w1", w1, "(2I, H, E)")
    check_rank("w2", w2, "(H, I, E)")
    run, counts = prepared_experts(
        x, ids, scores, w1.permute(2, 0, 1), w2.permute(2, 0, 1), b1, b2,
        slot_token, None, activation, gate_up, None,
    )  # fmt: skip
    return run(), counts
