"""A call of the experts on the meta device: the kernels it needs, without data, memory or a GPU.

The layer itself runs. A launch on the meta device compiles its kernel, or only notes it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import ops
from ..packed import stored
from .lora import with_adapter
from .nodes import run_backward
from .options import Options
from .run import Call, permute, run, sorted_rows
from .weights import ExpertWeights

# Tokens of a short and of a long batch: some kernels run in one of them alone. Nothing else that is
# compiled depends on their number.
BATCHES = (8, 2048)


class Slots(NamedTuple):
    """A routing, as `prepare.routed` takes it."""

    ids: torch.Tensor
    scores: torch.Tensor
    slot_token: torch.Tensor | None = None
    token_start: torch.Tensor | None = None


class Example(NamedTuple):
    """The checked arguments of a call. Only their shapes, dtypes and strides are used."""

    x: torch.Tensor  # (T, H), or rows (R, H) that arrive sorted
    slots: Slots | None  # None for sorted rows, which have `offsets` (E+1,) and maybe `scores` (R,)
    weights: ExpertWeights  # without adapters, which are options
    options: Options
    logits: torch.dtype | None = None  # of the router, where the auxiliary loss follows
    offsets: torch.Tensor | None = None
    scores: torch.Tensor | None = None


def meta_forward(example: Example, tokens: int, slots: Slots | None = None) -> torch.Tensor:
    """The output of an example on the meta device, for any number of tokens."""
    dtype, options = example.x.dtype, example.options._replace(fp8_weights=None)
    up, down = example.weights
    up = with_adapter(up, options.lora1, dtype, "triton")
    down = with_adapter(down, options.lora2, dtype, "triton")
    weights = ExpertWeights(up, down)
    x = _with_rows(example.x, tokens)
    if example.offsets is not None:
        p = sorted_rows(x, example.offsets, "triton")
        scores = None if example.scores is None else _with_rows(example.scores, tokens)
        return run(Call(x, scores, weights, p, options, "triton"))
    if slots is None:
        assert example.slots is not None
        slots = _slots_like(example.slots, tokens)
    ids, scores, slot_token, token_start = slots
    pairs: Any = {"slot_token": slot_token, "tokens": tokens, "token_start": token_start}
    p = permute(ids, weights.num_experts, **pairs, dtype=dtype, backend="triton")
    scores = scores.to(torch.promote_types(dtype, torch.float32))
    return run(Call(x, scores, weights, p, options, "triton"))


def meta_backward(out: torch.Tensor) -> None:
    """The nodes are called one by one: `backward()` imports sympy first, which takes 2.9 s, and no
    kernel of the backward pass is compiled until then."""
    with torch.no_grad():
        run_backward(
            out, torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
        )


def meta_steps(example: Example) -> None:
    """Training steps of the experts, and of the auxiliary loss where it follows."""
    example = on_meta(example)
    for tokens in BATCHES:
        meta_backward(meta_forward(example, tokens))
        if example.logits is not None:
            experts = example.weights.num_experts
            logits = torch.empty((tokens, experts), dtype=example.logits, device="meta")
            counts = torch.empty(experts, dtype=torch.int32, device="meta")
            loss, slope = ops.balance(logits, counts, 1.0, 0.0, "triton")
            ops.balance_backward(loss, slope, logits, 0.0, "triton")


def _slots_like(slots: Slots, tokens: int) -> Slots:
    if slots.slot_token is None:
        return Slots(_with_rows(slots.ids, tokens), _with_rows(slots.scores, tokens))
    slot_token = _with_rows(slots.slot_token, 2 * tokens)
    ids, scores = _with_rows(slots.ids, 2 * tokens), _with_rows(slots.scores, 2 * tokens)
    start = torch.empty(tokens + 1, dtype=torch.int32, device="meta")
    return Slots(ids, scores, slot_token, start)


def _with_rows(t: torch.Tensor, rows: int) -> torch.Tensor:
    shape = (rows, *t.shape[1:])
    return torch.empty(shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad)


# --- tensors without data -------------------------------------------------------------------------
def on_meta(part: Any) -> Any:
    """A tree of named tuples with its tensors on the meta device, laid out as they are."""

    def empty(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    return without_data(part, empty)


def without_data(part: Any, empty: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tree of named tuples with `empty` tensors like its own, which keep `requires_grad` and
    `main_grad`."""
    part = stored(part)
    if isinstance(part, tuple) and hasattr(part, "_make"):
        return type(part)._make([without_data(p, empty) for p in part])
    if not isinstance(part, torch.Tensor):
        return part
    twin: Any = empty(part).requires_grad_(part.requires_grad)
    main_grad = getattr(part, "main_grad", None)
    if main_grad is not None:
        twin.main_grad = empty(main_grad)
    return twin
