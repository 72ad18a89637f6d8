"""What is kept between forward and backward, and nothing else.

Two nodes, so that Z is free again before dX̃ is allocated: `Down` keeps Z and releases it when its
backward returns; `Up` needs only X. In a checkpoint a third one, `Rest`.
"""

from collections.abc import Callable
from functools import wraps

import torch

from . import ops
from .main_grad import added_to_main_grad, with_main_grad


def once_differentiable(backward: Callable) -> Callable:
    """Refuse to build a graph of this backward pass: second derivatives are not implemented.

    PyTorch's decorator raises only where the second derivative reaches the node through its
    incoming gradient. A Hessian of `experts(x, …).sum()`, whose incoming gradient is constant,
    would be zero without an error.
    """

    @wraps(backward)
    def call(ctx, *grads):
        # The engine enables gradients for `create_graph=True` alone; a compiled backward pass
        # refuses by itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "sonicmoe: second derivatives are not implemented, so create_graph=True is not"
                " supported. For a Hessian or a gradient penalty use"
                " sonicmoe.reference.layer.experts, which is plain differentiable PyTorch."
            )
        return backward(ctx, *grads)

    return call


def apply_then_rest(node: type[torch.autograd.Function], *args):
    """`node.apply(*args, rest)`, in one node or in two.

    A checkpoint computes again what the backward pass needs, and stops where it has the last of
    it. In there the node only keeps, and leaves its output to `later`: at the end of a block the
    second node, `Rest`, never runs again.
    """
    in_a_checkpoint = (
        not torch.compiler.is_compiling()  # leaves out by itself what nobody needs
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    )
    if not in_a_checkpoint:
        return node.apply(*args, None)
    rest: list[Callable[[], torch.Tensor]] = []
    like = node.apply(*args, rest)
    return Rest.apply(like, rest.pop())


def later(compute: Callable[[], torch.Tensor], rest: list, like: torch.Tensor, *shape: int):
    """In place of what `compute` returns; it takes its gradient."""
    rest.append(compute)
    return without_bytes(like, *shape)


class Rest(torch.autograd.Function):
    """What a node left to be computed; the gradient goes to that node."""

    @staticmethod
    def forward(ctx, like, compute):
        return compute()

    @staticmethod
    def backward(ctx, dout):
        return dout, None


def without_bytes(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None):
    """A tensor that only has a shape, a dtype and a device."""
    return like.new_empty_strided(shape, (0,) * len(shape), dtype=dtype)


def router_product(x: torch.Tensor, weight: torch.Tensor, wide: bool) -> torch.Tensor:
    """X Wrᵀ; `wide` in fp32, on a GPU without a copy of X: products of 16 bits add up in fp32."""
    if not wide:
        return torch.nn.functional.linear(x, weight)
    narrow = x.dtype.itemsize == 2 and weight.dtype == x.dtype
    if x.is_cuda and narrow and not torch.is_grad_enabled():  # it has no gradient
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.linear(x.to(dtype), weight.to(dtype))


class RouterLogits(torch.autograd.Function):
    """X, Wr → X Wrᵀ, and X once more for the experts.

    Both gradients of X meet here: the router's share is accumulated by its product, where autograd
    would add two (T, H) tensors (0.054 ms at 24576,1536,256,128,8). Kept: X, which is kept anyway.
    """

    @staticmethod
    def forward(ctx, x, weight, wide):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return router_product(x, weight, wide), x

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogits, dx):
        need_dx, need_dweight, _ = ctx.needs_input_grad
        if dlogits is None:
            return dx, None, None
        x, weight = ctx.saved_tensors
        dlogits = dlogits.to(x.dtype)
        if need_dx and dx is None:
            dx = dlogits @ weight
        elif need_dx:
            # Nobody else holds dx: the second result never leaves the layer.
            ops.router_gradient_into(dx, dlogits, weight)
        return dx, dlogits.mT @ x if need_dweight else None, None


class TopK(torch.autograd.Function):
    """logits (T, E) → scores (T, K) fp32, ids (T, K) int32.

    Kept: scores 4·T·K, ids 4·T·K; the logits too (T·E elements) unless the softmax ran over the
    choice alone, where they only lend their shape and dtype.
    """

    @staticmethod
    def forward(ctx, logits, k, softmax_over_topk, backend):
        ctx.set_materialize_grads(False)
        scores, ids = ops.topk(logits, k, softmax_over_topk, backend)
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(scores, ids, None if softmax_over_topk else logits)
        ctx.like = (logits.shape[1], logits.dtype)
        ctx.options = (softmax_over_topk, backend)
        return scores, ids

    @staticmethod
    @once_differentiable
    def backward(ctx, dscores, _):
        if dscores is None:
            return None, None, None, None
        scores, ids, logits = ctx.saved_tensors
        if logits is None:
            logits = without_bytes(scores, scores.shape[0], ctx.like[0], dtype=ctx.like[1])
        dlogits = ops.topk_backward(dscores, scores, ids, logits, *ctx.options)
        return dlogits, None, None, None


class SigmoidTopK(torch.autograd.Function):
    """logits (T, E), bias (E,) → scores (T, K) fp32, ids (T, K) int32. Kept: 8·T·K."""

    @staticmethod
    def forward(ctx, logits, bias, k, groups, groups_kept, normalize, scale, backend):
        ctx.set_materialize_grads(False)
        scores, affinity, ids = ops.sigmoid_topk(
            logits, bias, k, groups, groups_kept, normalize, scale, backend
        )
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(affinity, ids)
        ctx.like = (logits.shape[1], logits.dtype)
        ctx.options = (normalize, scale, backend)
        return scores, ids

    @staticmethod
    @once_differentiable
    def backward(ctx, dscores, _):
        if dscores is None:
            return (None,) * 8
        affinity, ids = ctx.saved_tensors
        logits = without_bytes(affinity, affinity.shape[0], ctx.like[0], dtype=ctx.like[1])
        dlogits = ops.sigmoid_topk_backward(dscores, affinity, ids, logits, *ctx.options)
        return dlogits, *([None] * 7)


class Balance(torch.autograd.Function):
    """logits (T, E), counts (E,) → the auxiliary loss. Kept: the logits, and 4·E bytes."""

    @staticmethod
    def forward(ctx, logits, counts, balance, z, backend):
        loss, slope = ops.balance(logits, counts, balance, z, backend)
        ctx.save_for_backward(slope, logits)
        ctx.options = (z, backend)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        return ops.balance_backward(dloss, *ctx.saved_tensors, *ctx.options), *([None] * 4)


def _rounded(weight: torch.Tensor, data: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The weight in the dtype of the data, and whether its gradient is fp32 all the same.

    PyTorch would round the gradient as well, and widen it again: 8% of a layer at
    24576,1536,256,128,8.
    """
    if weight.dtype == data.dtype:
        return weight, False
    return weight.to(data.dtype), weight.dtype == torch.float32


class Up(torch.autograd.Function):
    """X, W1, b1 → Z, A. Kept: X 2·T·H (the caller's own), the row maps. A carries no gradient.

    W1 in another dtype than X is rounded here, and kept so.
    """

    @staticmethod
    def forward(
        ctx, x, w1, b1, row_token, slot_row, token_start, expert_start, tiles,
        tile_height, activation, concatenated, keep_z, backend,
    ):  # fmt: skip
        # Else autograd would fill R·I zeros for A, which has no gradient.
        ctx.set_materialize_grads(False)
        ctx.main = with_main_grad(w1)
        w1, ctx.wide = _rounded(w1, x)
        z, a = ops.up(
            x, w1, b1, row_token, expert_start, tiles,
            tile_height, activation, concatenated, keep_z, backend,
        )  # fmt: skip
        ctx.mark_non_differentiable(a)
        ctx.save_for_backward(x, w1, row_token, slot_row, token_start, expert_start, tiles)
        ctx.options = (tile_height, backend)
        return z, a

    @staticmethod
    @once_differentiable
    def backward(ctx, dz, _):
        if dz is None:
            return (None,) * 13
        tile_height, backend = ctx.options
        need_dx, need_dw1, need_db1 = ctx.needs_input_grad[:3]
        if need_dw1 and ctx.main is not None:
            dx, db1 = ops.up_backward_into(
                ctx.main.main_grad, dz, *ctx.saved_tensors, tile_height, need_dx, need_db1, backend
            )
            dw1 = added_to_main_grad(ctx.main)
        else:
            dx, dw1, db1 = ops.up_backward(
                dz, *ctx.saved_tensors, tile_height, need_dx, need_dw1, need_db1, ctx.wide, backend
            )
        grads = (dx if need_dx else None, dw1 if need_dw1 else None, db1 if need_db1 else None)
        return *grads, *([None] * 10)


class Down(torch.autograd.Function):
    """Z, A, scores, W2, b2 → O. Kept: Z 2·R·N, scores 4·R, the row maps 12·R. Not A, not Y.

    Without row maps (rows arrived sorted by expert) O is one row for each row, times its score
    where there are scores. Applied by `apply_then_rest`.
    """

    @staticmethod
    def forward(
        ctx, z, a, scores, w2, b2, row_token, row_slot, slot_row, token_start, expert_start, tiles,
        tokens, tile_height, activation, concatenated, backend, rest,
    ):  # fmt: skip
        ctx.main = with_main_grad(w2)
        w2, ctx.wide = _rounded(w2, a)

        def output():
            grouped = row_token is None
            row_scores = scores if grouped else None
            y = ops.down(a, w2, b2, row_scores, expert_start, tiles, tile_height, grouped, backend)
            if grouped:
                return y
            return ops.aggregate(y, scores, slot_row, token_start, tokens, backend)

        ctx.save_for_backward(z, w2, b2, scores, row_token, row_slot, slot_row, expert_start, tiles)
        ctx.options = (tile_height, activation, concatenated, backend)
        return output() if rest is None else later(output, rest, a, tokens, w2.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        *options, backend = ctx.options
        need_dz, _, need_dscores, need_dw2, need_db2 = ctx.needs_input_grad[:5]
        if need_dw2 and ctx.main is not None:
            dz, db2, dscores = ops.down_backward_into(
                ctx.main.main_grad, dout, *ctx.saved_tensors, *options,
                need_dz, need_db2, need_dscores, backend,
            )  # fmt: skip
            dw2 = added_to_main_grad(ctx.main)
        else:
            dz, dw2, db2, dscores = ops.down_backward(
                dout, *ctx.saved_tensors, *options,
                need_dz, need_dw2, need_db2, need_dscores, ctx.wide, backend,
            )  # fmt: skip
        grads = (
            dz if need_dz else None,
            None,
            dscores if need_dscores else None,
            dw2 if need_dw2 else None,
            db2 if need_db2 else None,
        )
        return *grads, *([None] * 12)
