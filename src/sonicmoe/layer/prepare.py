"""From a caller's arguments to a `Call`: check, autocast, precompile, permute."""

from typing import Any

import torch

from ..errors import bad_argument
from ..ops.kinds import kind_of
from ..ops.layout import dense_weight
from ..packed import stored
from ..tensors import Weight
from ..validation import (
    check_device,
    check_floating,
    check_integer,
    check_pairs,
    check_shape,
    check_slots,
    check_weights,
    is_autocast,
    nan_unless,
    resolve_backend,
)
from .lora import check_adapter, with_adapter
from .meta import Example, Slots
from .options import Options
from .precompile import Step
from .run import Call, permute, sorted_rows
from .weights import ExpertWeights, Projection


def routed(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    weights: ExpertWeights,
    options: Options,
    *,
    slot_token: torch.Tensor | None = None,
    token_start: torch.Tensor | None = None,
    trusted: bool = False,
    logits: torch.dtype | None = None,
) -> Call:
    """A call for tokens x (T, H) with ids and scores as `experts` takes them.

    `trusted`: the values of ids, slot_token and token_start come from our own routers. `logits` is
    the dtype of the router's logits where the auxiliary loss follows.
    """
    if trusted:
        check_pairs(x, ids, scores, slot_token, token_start)
    else:
        ids, scores, token_start = check_slots(x, ids, scores, slot_token, token_start)
    x, weights, backend = check(x, weights, options)
    scores = score_dtype(scores, x)
    slots = Slots(ids, scores, slot_token, token_start)
    step = _step(backend, x, slots, weights, options, logits)
    x, weights = _dense(x, weights, options, backend)
    p = permute(
        ids,
        weights.num_experts,
        slot_token=slot_token,
        tokens=x.shape[0],
        token_start=token_start,
        dtype=x.dtype,
        backend=backend,
    )
    return Call(x, scores, weights, p, options, backend, step)


def grouped(
    rows: torch.Tensor,
    counts: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scores: torch.Tensor | None,
    weights: ExpertWeights,
    options: Options,
) -> Call:
    """A call for rows that are sorted by expert, as `grouped_experts` takes them."""
    if counts is None and offsets is None:
        raise bad_argument("counts", "counts, offsets or both", "neither", "Pass counts (E,).")
    rows, weights, backend = check(rows, weights, options)
    scores = _checked_groups(rows, counts, offsets, scores, weights.num_experts)
    if counts is not None and offsets is not None:  # gaps between the experts
        ids, scores = _expert_of_row(rows, counts, offsets, scores)
        step = _step(backend, rows, Slots(ids, scores), weights, options)
        p = permute(ids, weights.num_experts, dtype=rows.dtype, backend=backend)
    else:
        if offsets is None:
            assert counts is not None
            offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        step = _step(backend, rows, None, weights, options, None, offsets, scores)
        p = sorted_rows(rows, offsets, backend)
    rows, weights = _dense(rows, weights, options, backend)
    return Call(rows, scores, weights, p, options, backend, step)


def _checked_groups(rows, counts, offsets, scores, num_experts: int) -> torch.Tensor | None:
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
    if scores is None:
        return None
    check_shape("scores", scores, (rows.shape[0],), "(R,)")
    check_floating("scores", scores)
    check_device("scores", scores, rows)
    return score_dtype(scores, rows)


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
    ids = torch.where(fits, torch.where(inside, expert, -1), 0)  # any id works: scores are NaN
    return ids[:, None], scores[:, None]


def check(
    x: torch.Tensor,
    weights: ExpertWeights,
    options: Options,
) -> tuple[torch.Tensor, ExpertWeights, str]:
    """Autocast and validate; also returns the backend."""
    (up, down), lora1, lora2 = weights, options.lora1, options.lora2
    x, b1, b2 = autocast(x, up.bias, down.bias)
    w1, w2 = stored(up.weight), stored(down.weight)
    if lora1 is not None or lora2 is not None:
        _, w1, w2 = autocast(x, w1, w2)
        _check_frozen(w1=w1, w2=w2, b1=b1, b2=b2)
    check_weights(x, w1, w2, b1, b2, options.activation)
    up, down = Projection(Weight.of(w1), b1), Projection(Weight.of(w2), b2)
    weights = ExpertWeights(up, down)
    backend = resolve_backend(options.backend, x)
    backend = kind_of(options.precision).check(x, weights, backend)
    check_adapter("lora1", lora1, w1)
    check_adapter("lora2", lora2, w2)
    return x, weights, backend


def _step(backend: str, *example: Any) -> Step | None:
    """Where gradients are off, half of what would be precompiled never runs."""
    if backend != "triton" or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    return Step(Example(*example))


def _dense(x, weights, options: Options, backend: str) -> tuple[torch.Tensor, ExpertWeights]:
    """x and weights dense, and the weights with their adapters."""
    up = with_adapter(_dense_weight(weights.up), options.lora1, x.dtype, backend)
    down = with_adapter(_dense_weight(weights.down), options.lora2, x.dtype, backend)
    return x.contiguous(), ExpertWeights(up, down)


def _dense_weight(w: Projection) -> Projection:
    dense = w.weight.dense
    if dense is None:
        return w
    found = dense_weight(dense)
    return w if found is dense else w._replace(weight=Weight(found))


def _check_frozen(**tensors: torch.Tensor | Weight | None) -> None:
    for name, t in tensors.items():
        if t is not None and t.requires_grad:
            raise bad_argument(
                name,
                "a frozen tensor beside LoRA adapters",
                "one that requires a gradient",
                "requires_grad_(False).",
            )


def score_dtype(scores: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Scores in fp32, or in float64 where the data is."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return scores if scores.dtype == dtype else scores.to(dtype)  # `to` alone takes 1.5 µs


def autocast(x: torch.Tensor, *others: Any) -> tuple:
    """In the dtype of autocast where it is enabled; like PyTorch's, it leaves float64 alone.

    Packed weights are decoded to the dtype of x.
    """
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return x, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if _is_autocast(t) else t for t in (x, *others))


def _is_autocast(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and is_autocast(t)
