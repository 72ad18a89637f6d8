"""The steps of the layer as functions: experts, the router's logits, top-K, the permutation.

A token's way reads from top to bottom in `experts_and_counts`; `MoE.forward` has the same
statements.
"""

import torch

from . import autograd, ops
from .autograd import Down, Options, Up
from .autograd_fp8 import Fp8Down, Fp8Up
from .checkpoint import deferred_output, finish
from .enums import ActivationType
from .errors import bad_argument
from .fp8_tensors import Z_DTYPE
from .fp8_weights import quantize_weights
from .memory_policy import KEEP, MemoryPolicy, memory_policy
from .ops.layout import dense_weight
from .permutation import Permutation
from .precompile import precompile_step
from .tuning import tile_m
from .validation import (
    check_device,
    check_floating,
    check_fp8,
    check_integer,
    check_k,
    check_num_experts,
    check_precision,
    check_rank,
    check_shape,
    check_slots,
    check_weights,
    fp8_backend,
    is_autocast,
    nan_unless,
    resolve_backend,
)
from .weights import ExpertWeights


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
    precision: str | None = None,
    memory: str | MemoryPolicy = "keep",
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
    Returns (T, H). Kept for the backward pass: x, Z and about 20 bytes for each (token, expert);
    `memory` is "keep", "fp8", "recompute" or a `MemoryPolicy`.

    `precision="fp8"` runs the grouped GEMMs, backward too, in e4m3 for x in bf16: output and
    gradients then err by about 7% of their norm. "fp8_bf16_dw" computes weight gradients in bf16.
    No biases; H and I are multiples of 16. The weights are quantized in every call.
    """
    weights = ExpertWeights(w1, w2, b1, b2, activation, gate_up)
    return experts_and_counts(
        x,
        ids,
        scores,
        weights,
        memory_policy(memory),
        slot_token=slot_token,
        token_start=token_start,
        precision=precision,
        backend=backend,
    )[0]


def experts_and_counts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    weights: ExpertWeights,
    memory: MemoryPolicy = KEEP,
    *,
    slot_token: torch.Tensor | None = None,
    token_start: torch.Tensor | None = None,
    precision: str | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`experts`, and the rows of each expert (E,)."""
    ids, scores, token_start = check_slots(x, ids, scores, slot_token, token_start)
    x, weights, backend = prepare(x, weights, backend, precision)
    scores = score_dtype(scores, x)
    precompile_step(experts, x, ids, weights, backend, precision=precision, memory=memory)
    p = permute(
        ids,
        weights.num_experts,
        slot_token=slot_token,
        tokens=x.shape[0],
        token_start=token_start,
        dtype=x.dtype,
        backend=backend,
    )
    assert p.counts is not None  # only rows that arrive sorted have none
    options = options_of(x, scores, weights, memory, precision, backend)
    return _run(x, scores, weights, p, options, precision), p.counts


def _run(
    x: torch.Tensor,
    scores: torch.Tensor | None,
    weights: ExpertWeights,
    p: Permutation,
    options: Options,
    precision: str | None,
) -> torch.Tensor:
    """The two nodes of the experts. `MoE.forward` calls them itself."""
    w1, w2, b1, b2 = weights[:4]
    recompute, deferred = options.keep_z == "recompute", deferred_output()
    common = (p, x.shape[0], options, deferred)
    if precision is not None:
        transposed = options.keep_z in Z_DTYPE
        q1, q2 = quantize_weights(w1, w2, transposed, options.backend)
        found = Fp8Up.apply(x, w1, q1, p, options)
        source = (x, w1, q1) if recompute else ()
        out = Fp8Down.apply(scores, w2, q2, *common, *found, *source)
    else:
        z, a, *z8 = Up.apply(x, w1, b1, p, options)
        source = (x, w1, b1) if recompute else tuple(z8)
        out = Down.apply(z, a, scores, w2, b2, *common, *source)
    return finish(out, deferred)


def prepare(
    x: torch.Tensor, weights: ExpertWeights, backend: str | None, precision: str | None = None
) -> tuple[torch.Tensor, ExpertWeights, str]:
    """Before the permutation: autocast, validate, make x and weights dense, pick the backend."""
    w1, w2, b1, b2, activation, gate_up = weights
    x, b1, b2 = autocast(x, b1, b2)
    check_weights(x, w1, w2, b1, b2, activation, gate_up)
    check_precision(precision)
    backend = resolve_backend(backend, x)
    if precision is not None:
        check_fp8(x, w1, w2, b1, b2)
        backend = fp8_backend(backend, x)
    dense = ExpertWeights(dense_weight(w1), dense_weight(w2), b1, b2, activation, gate_up)
    return x.contiguous(), dense, backend


def options_of(
    x: torch.Tensor,
    scores: torch.Tensor | None,
    weights: ExpertWeights,
    memory: MemoryPolicy,
    precision: str | None,
    backend: str,
) -> Options:
    """How the nodes compute. Nothing is kept where no backward pass can follow."""
    keep_z = "no"
    if torch.is_grad_enabled():
        of_scores = scores is not None and scores.requires_grad
        if x.requires_grad or of_scores or weights.need_gradient():
            keep_z = memory.z
    bf16_dw = precision == "fp8_bf16_dw"
    return Options(*weights[4:], keep_z, memory.slices, bf16_dw, backend)


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
    precision: str | None = None,
    memory: str | MemoryPolicy = "keep",
    backend: str | None = None,
) -> torch.Tensor:
    """Run the experts on rows that are already sorted by expert, such as an all-to-all's output.

    rows (R, H); counts (E,) rows of each expert, or None with `offsets` (E+1,) where expert e has
    rows [offsets[e], offsets[e+1]). Both, offsets (E,) then, leave gaps between the experts: expert
    e has rows [offsets[e], offsets[e] + counts[e]). Rows of no expert are neither read nor trusted;
    their output and gradient are zero. scores (R,), optional, multiply the rows of the result.
    Counts or offsets that do not fit R rows raise a ValueError on a CPU; on a GPU, where reading
    them would wait for the device, output and dX are NaN. `precision` and `memory` as in
    `experts`; `slices` has no effect without gaps, since no rows are combined.
    """
    policy = memory_policy(memory)
    weights = ExpertWeights(w1, w2, b1, b2, activation, gate_up)
    rows, weights, backend = prepare(rows, weights, backend, precision)
    num_experts = weights.num_experts
    if counts is None and offsets is None:
        raise bad_argument("counts", "counts, offsets or both", "neither", "Pass counts (E,).")
    with_gaps = counts is not None and offsets is not None
    sizes = {"counts": num_experts, "offsets": num_experts + (not with_gaps)}
    for (name, size), t in zip(sizes.items(), (counts, offsets), strict=True):
        if t is not None:
            if not isinstance(t, torch.Tensor):
                # A list would be copied to the GPU in every call, and the host would wait for it.
                remedy = f"Pass torch.tensor({name}, device=rows.device)."
                raise bad_argument(name, "a tensor", f"a {type(t).__name__}", remedy)
            check_shape(name, t, (size,), "(E,)" if size == num_experts else "(E+1,)")
            check_integer(name, t)
            check_device(name, t, rows)
    if scores is not None:
        check_shape("scores", scores, (rows.shape[0],), "(R,)")
        check_floating("scores", scores)
        check_device("scores", scores, rows)
        scores = score_dtype(scores, rows)
    if with_gaps:
        ids, scores = _expert_of_row(rows, counts, offsets, scores)
        out, _ = experts_and_counts(
            rows, ids, scores, weights, policy, precision=precision, backend=backend
        )
        return out
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0)) if offsets is None else offsets
    m = tile_m(rows.dtype.itemsize)
    start, tiles = ops.tiles(start, rows.shape[0], m, backend)
    p = Permutation.of_sorted_rows(start, tiles, m)
    options = options_of(rows, scores, weights, policy, precision, backend)
    return _run(rows, scores, weights, p, options, precision)


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
    expected = f"ranges [offsets[e], offsets[e] + counts[e]) in order within {len(row)} rows"
    scores = nan_unless(fits, scores, "offsets", expected, "others", "Sort the rows by expert.")
    ids = torch.where(fits, torch.where(inside, expert, -1), 0)  # each row meets its NaN
    return ids[:, None], scores[:, None]


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
        return autograd.router_gemm(x, weight, fp32_logits), x
    logits, same = autograd.RouterLogits.apply(x, weight, fp32_logits)
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
    m = tile_m(dtype.itemsize)
    row_token, row_slot, slot_row, counts, expert_start, tiles = ops.permute(
        ids, num_experts, slot_token, m, backend
    )
    if slot_token is not None and token_start is None:
        if tokens is None:
            raise bad_argument("tokens", "the number of tokens", tokens, "slot_token needs it.")
        every = torch.arange(tokens + 1, device=ids.device, dtype=slot_token.dtype)
        token_start = torch.searchsorted(slot_token, every, out_int32=True)
    if token_start is not None:
        token_start = token_start.contiguous()
    return Permutation(row_token, row_slot, slot_row, token_start, counts, expert_start, tiles, m)


def score_dtype(scores: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Scores in fp32, or in float64 where the data is."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return scores if scores.dtype == dtype else scores.to(dtype)  # `to` alone takes 1.5 µs


def autocast(x: torch.Tensor, *others: torch.Tensor | None) -> tuple:
    """In the dtype of autocast where it is enabled; like PyTorch's, it leaves float64 alone."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return x, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t is not None and is_autocast(t) else t for t in (x, *others))
