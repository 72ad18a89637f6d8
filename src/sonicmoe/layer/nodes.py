"""What is kept between forward and backward, and nothing else.

Two nodes, so that Z is free again before the rows of dX are allocated: `Down` keeps Z and releases
it when its backward returns; `Up` needs only X. dZ goes from one to the other as the gradient of
placeholders that `Up` returns. In a checkpoint there is a third node, see `checkpoint`.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from .. import ops
from ..ops.kinds import How, Source, kind_of
from ..tensors import Dz, Kept, Linear, Needs, Permutation, Rows, Weight
from .checkpoint import Compute, packs_saved_tensors, placeholder
from .main_grad import WithMainGrad, added_to_main_grad, with_main_grad


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
_CONSTANTS = frozenset((type(None), bool, int, str))


def _save(ctx: Any, *parts: tuple) -> None:
    """Keep tuples of tensors and constants."""
    values: list = []
    for part in parts:
        values += [*part]
    tensors = [v for v in values if type(v) not in _CONSTANTS]
    ctx.parts = [(type(part), len(part)) for part in parts]
    ctx.places = [i for i, v in enumerate(values) if type(v) not in _CONSTANTS]
    ctx.constants = [v if type(v) in _CONSTANTS else None for v in values]
    ctx.dense = [t.is_contiguous() for t in tensors] if packs_saved_tensors() else None
    ctx.save_for_backward(*tensors)


def _saved(ctx: Any) -> list:
    tensors = ctx.saved_tensors
    if ctx.dense is not None:  # a hook may return other strides, and operators rely on these
        tensors = [t.contiguous() if d else t for t, d in zip(tensors, ctx.dense, strict=True)]
    values, parts, end = [*ctx.constants], [], 0
    for place, t in zip(ctx.places, tensors, strict=True):
        values[place] = t
    for kind, size in ctx.parts:
        part = values[end : end + size]
        parts += [part if kind is tuple else kind(*part)]
        end += size
    return parts


def _gradient(weight: torch.Tensor | None, data: torch.dtype) -> tuple[WithMainGrad | None, bool]:
    """The `main_grad` of a weight; else whether its gradient stays in fp32.

    PyTorch would round the gradient of an fp32 weight to the dtype of the data, and cast it back:
    8% of a layer at 24576,1536,256,128,8.
    """
    if weight is None:
        return None, False
    fp32 = weight.dtype == torch.float32 and data != torch.float32
    return with_main_grad(weight), fp32


# --- up -------------------------------------------------------------------------------------------
class UpGiven(NamedTuple):
    """What `Up` takes that has no gradient. `u` is U1 of `Forward`."""

    w: Weight
    u: torch.Tensor | None
    p: Permutation
    how: How


class Up(torch.autograd.Function):
    """X and the projection W1 → placeholders of dZ. Kept: X 2·T·H (the caller's), the row maps."""

    @staticmethod
    def forward(ctx, x, weight, bias, lora_a, lora_b, given: UpGiven):
        ctx.set_materialize_grads(False)
        w, u, p, how = given
        kind = kind_of(how.precision)
        ctx.how, ctx.gradient = how, _gradient(weight, x.dtype)
        maps = p._replace(row_slot=None, counts=None)
        _save(ctx, kind.kept_weight(w, how), maps, (x, u, lora_a, lora_b))
        experts, n, _ = w.shape
        dz = kind.dz_like(partial(placeholder, x), p.rows_of(x), experts, n)
        of_rows, of_columns = kind.dz_needed(Needs(*ctx.needs_input_grad[:-1]))
        needed = (of_rows, of_rows, of_columns, of_columns)
        constant = [t for t, need in zip(dz, needed, strict=True) if t is not None and not need]
        ctx.mark_non_differentiable(*constant)
        return tuple([t for t in dz if t is not None])

    @staticmethod
    def backward(ctx, *dz):
        refuse_second_derivatives()
        if all(t is None for t in dz):
            return (None,) * 6
        w, p, (x, u, lora_a, lora_b) = _saved(ctx)
        needs, (main, fp32) = Needs(*ctx.needs_input_grad[:-1]), ctx.gradient
        into = None if main is None or not needs.weight else main.main_grad
        source = Source(x, Linear(w, None, lora_a, lora_b), u)
        found = ops.up_backward(Dz(*dz), source, p, needs, into, fp32, ctx.how)
        dx, dw, *rest = found
        return dx, dw if into is None else added_to_main_grad(main), *rest, None


# --- down -----------------------------------------------------------------------------------------
class DownGiven(NamedTuple):
    """What `Down` takes that has no gradient. `rows`, `kept` and `u`, which is U2, are those of
    `Forward`; `source` is given if Z is computed from it again. `deferred` is that of
    `checkpoint`."""

    w: Weight
    rows: Rows
    kept: Kept
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


class Down(torch.autograd.Function):
    """Scores, the projection W2 and dZ's placeholders → O. Kept: Z 2·R·N, scores 4·R, the row maps
    12·R. Not A, not Y.

    For rows that arrive sorted, O has one row for each, times its score where there are scores.
    """

    @staticmethod
    def forward(ctx, scores, weight, bias, lora_a, lora_b, given: DownGiven, *dz):
        w, rows, kept, source, u, p, shape, how, deferred = given
        ctx.how, ctx.gradient = how, _gradient(weight, shape.dtype)
        maps, w_kept = p._replace(counts=None), kind_of(how.precision).kept_weight(w, how)
        of_w2 = (scores, bias, lora_a, lora_b, u)
        if source is not None:
            x, (w1, b1, _, lora_b1), u1 = source
            _save(ctx, w_kept, maps, of_w2, w1, (x, b1, lora_b1, u1))
        else:
            _save(ctx, w_kept, maps, of_w2, kept)
        given_down = (rows, Linear(w, bias, lora_a, lora_b), u, scores, p, shape.tokens, how)
        if deferred is None:
            return ops.down(*given_down)
        deferred.append(lambda: ops.down(*given_down))
        return placeholder(p.tiles, shape.tokens, w.shape[1], dtype=shape.dtype)

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives()
        how = ctx.how
        w, p, (scores, bias, lora_a, lora_b, u), *rest = _saved(ctx)
        if how.recompute:
            w1, (x, b1, lora_b1, u1) = rest
            kept = ops.recomputed(dout, Source(x, Linear(w1, b1, None, lora_b1), u1), p, how)
        else:
            (kept,) = rest
        del rest
        of_scores, *of_w2, _ = ctx.needs_input_grad[:6]
        needs, (main, fp32) = Needs(of_scores, *of_w2), ctx.gradient
        into = None if main is None or not needs.weight else main.main_grad
        dz_needed = ctx.needs_input_grad[6:]
        given = (dout, kept, Linear(w, bias, lora_a, lora_b), u, scores, p, needs)
        of_columns = len(dz_needed) > 2 and dz_needed[2]
        found, dz = ops.down_backward(*given, dz_needed[0], of_columns, into, fp32, how)
        dscores, dw, *of_rest = found
        of_weight = dw if into is None else added_to_main_grad(main)
        return dscores, of_weight, *of_rest, None, *dz[: len(dz_needed)]


def run_backward(out: torch.Tensor, dout: torch.Tensor) -> None:
    """The backward pass of a layer's output, without PyTorch's engine."""
    down = out.grad_fn
    assert down is not None
    dz = Down.backward(down, dout)[6:]
    ups = [node for node, _ in down.next_functions if type(node).__name__ == "UpBackward"]
    if ups:
        Up.backward(ups[0], *dz)
