"""What is kept between forward and backward, and nothing else.

Two nodes, so that Z is free again before the rows of dX are allocated: `Down` keeps Z and releases
it when its backward returns; `Up` needs only X. dZ goes from one to the other as the gradient of
placeholders that `Up` returns. In a checkpoint there is a third node, see `checkpoint`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..tensors import Permutation
from .checkpoint import Compute, packs_saved_tensors, placeholder
from .main_grad import with_main_grad
from .operands import Gradient, Gradients, How, Source, kind_of
from .weights import Projection


def refuse_second_derivatives() -> None:
    """Raise where a graph of this backward pass is being built.

    PyTorch's `once_differentiable` raises only where the second derivative reaches the node through
    its incoming gradient. A Hessian of `experts(x, …).sum()`, whose incoming gradient is constant,
    would be zero without an error.
    """
    # The engine enables gradients for `create_graph=True` alone; a compiled backward pass
    # refuses by itself.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "sonicmoe: second derivatives are not implemented, so create_graph=True is not"
            " supported. For a Hessian or a gradient penalty use"
            " sonicmoe.reference.layer.experts, which is plain differentiable PyTorch."
        )


# --- saved tensors --------------------------------------------------------------------------------
_TENSOR = "a tensor"


def _save(ctx: Any, parts: tuple) -> None:
    """Keep a named tuple of tensors, None, ints and such tuples."""
    tensors: list[torch.Tensor] = []
    ctx.parts = _without_tensors(parts, tensors)
    ctx.dense = [t.is_contiguous() for t in tensors] if packs_saved_tensors() else None
    ctx.save_for_backward(*tensors)


def _saved(ctx: Any) -> Any:
    tensors = ctx.saved_tensors
    if ctx.dense is not None:  # a hook may return other strides, and operators rely on these
        tensors = [t.contiguous() if d else t for t, d in zip(tensors, ctx.dense, strict=True)]
    return _with_tensors(ctx.parts, iter(tensors))


def _without_tensors(part: tuple, tensors: list[torch.Tensor]) -> tuple[Any, list]:
    """The type of `part` and its values, with a mark in the place of each tensor, which is appended
    to `tensors`."""
    values = list(part)
    for i, value in enumerate(values):
        if value is None:
            continue
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            values[i] = _TENSOR
        elif isinstance(value, tuple):
            values[i] = _without_tensors(value, tensors)
    return type(part), values


def _with_tensors(part: tuple[Any, list], tensors: Iterator[torch.Tensor]) -> Any:
    kind, values = part
    values = values.copy()
    for i, value in enumerate(values):
        if value is _TENSOR:
            values[i] = next(tensors)
        elif type(value) is tuple:
            values[i] = _with_tensors(value, tensors)
    return kind._make(values)


def _needed(found: tuple, needs: tuple[bool, ...]) -> tuple:
    """None where an operator returned an empty tensor for a gradient that is not needed."""
    return tuple([t if need else None for t, need in zip(found, needs, strict=True)])


def _gradient(weight: torch.Tensor, data: torch.dtype) -> Gradient:
    """PyTorch would round the gradient of an fp32 weight to the dtype of the data, and cast it
    back: 8% of a layer at 24576,1536,256,128,8."""
    fp32 = weight.dtype == torch.float32 and data != torch.float32
    return Gradient(with_main_grad(weight), fp32)


# --- up -------------------------------------------------------------------------------------------
class UpGiven(NamedTuple):
    """What `Up` takes that has no gradient. `u` is that of `Forward`."""

    operand: Any
    u: torch.Tensor | None
    p: Permutation
    how: How


class _UpSaved(NamedTuple):
    source: Source
    lora_a: torch.Tensor | None
    p: Permutation


class Up(torch.autograd.Function):
    """X and the projection W1 → placeholders of dZ. Kept: X 2·T·H (the caller's), the row maps."""

    @staticmethod
    def forward(ctx, x, weight, bias, lora_a, lora_b, given: UpGiven):
        ctx.set_materialize_grads(False)
        operand, u, p, how = given
        kind = kind_of(how.precision)
        ctx.how, ctx.gradient = how, _gradient(weight, x.dtype)
        source = Source(x, kind.kept_operand(operand, how), None, u, lora_b)
        _save(ctx, _UpSaved(source, lora_a, p._replace(row_slot=None, counts=None)))
        dz = kind.dz_like(x, weight.shape, p, how)
        needed = kind.dz_needed(Gradients(*ctx.needs_input_grad[:-1]), how)
        constant = [t for t, need in zip(dz, needed, strict=True) if not need]
        ctx.mark_non_differentiable(*constant)
        return tuple(dz)

    @staticmethod
    def backward(ctx, *dz):
        refuse_second_derivatives()
        if all(t is None for t in dz):
            return (None,) * 6
        saved, how = _saved(ctx), ctx.how
        kind, needs = kind_of(how.precision), Gradients(*ctx.needs_input_grad[:-1])
        found = kind.up_backward(
            kind.Dz(*dz), saved.source, saved.lora_a, saved.p, needs, ctx.gradient, how
        )
        return *_needed(found, needs), None


# --- down -----------------------------------------------------------------------------------------
class DownGiven(NamedTuple):
    """What `Down` takes that has no gradient. `rows` and `kept` are those of `Forward`; `source` is
    given in the place of `kept` if Z is recomputed. `deferred` is that of `checkpoint`."""

    operand: Any
    rows: Any
    kept: Any
    source: Source | None
    u: torch.Tensor | None
    p: Permutation
    shape: "Shape"
    how: How
    deferred: list[Compute] | None


class Shape(NamedTuple):
    """Of the output: tokens, or sorted rows, and the dtype."""

    tokens: int
    dtype: torch.dtype


class _DownSaved(NamedTuple):
    scores: torch.Tensor | None
    operand: Any
    bias: torch.Tensor | None
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    u: torch.Tensor | None
    kept: Any
    source: Source | None
    p: Permutation


class Down(torch.autograd.Function):
    """Scores, the projection W2 and dZ's placeholders → O. Kept: Z 2·R·N, scores 4·R, the row maps
    12·R. Not A, not Y.

    For rows that arrive sorted, O has one row for each, times its score where there are scores.
    """

    @staticmethod
    def forward(ctx, scores, weight, bias, lora_a, lora_b, given: DownGiven, *dz):
        operand, rows, kept, source, u, p, shape, how, deferred = given
        kind = kind_of(how.precision)
        ctx.how, ctx.gradient = how, _gradient(weight, shape.dtype)
        maps = p._replace(counts=None)
        of_w2 = (kind.kept_operand(operand, how), bias, lora_a, lora_b, u)
        _save(ctx, _DownSaved(scores, *of_w2, kept, source, maps))
        w = Projection(weight, bias, lora_a, lora_b)
        given_down = (rows, operand, w, u, scores, p, shape.tokens, how)
        if deferred is None:
            return kind.down(*given_down)
        deferred.append(lambda: kind.down(*given_down))
        return placeholder(p.tiles, shape.tokens, weight.shape[1], dtype=shape.dtype)

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives()
        s, how = _saved(ctx), ctx.how
        kind = kind_of(how.precision)
        kept = s.kept if s.source is None else kind.recomputed(dout, s.source, s.p, how)
        of_scores, *of_w2 = ctx.needs_input_grad[:5]
        needs, dz_needs = Gradients(of_scores, *of_w2), kind.Dz(*ctx.needs_input_grad[6:])
        w = Projection(s.operand.weight, s.bias, s.lora_a, s.lora_b)
        found, dz = kind.down_backward(
            dout, kept, s.operand, w, s.u, s.scores, s.p, needs, dz_needs, ctx.gradient, how
        )
        return *_needed(found, needs), None, *_needed(dz, dz_needs)


def run_backward(out: torch.Tensor, dout: torch.Tensor) -> None:
    """The backward pass of a layer's output, without PyTorch's engine."""
    down = out.grad_fn
    assert down is not None
    dz = Down.backward(down, dout)[6:]
    ups = [node for node, _ in down.next_functions if type(node).__name__ == "UpBackward"]
    if ups:
        Up.backward(ups[0], *dz)
