"""The nodes of the router: logits, top-K, the auxiliary loss."""

import torch

from .. import ops
from ..layer.checkpoint import placeholder
from ..layer.nodes import refuse_second_derivatives


def router_gemm(x: torch.Tensor, weight: torch.Tensor, fp32_logits: bool) -> torch.Tensor:
    """X Wrᵀ. On a GPU, fp32 logits need no fp32 copy of X: its GEMM adds up in fp32."""
    if not fp32_logits:
        return torch.nn.functional.linear(x, weight)
    is_16_bit = x.dtype.itemsize == 2 and weight.dtype == x.dtype
    if x.is_cuda and is_16_bit and not torch.is_grad_enabled():  # it has no gradient
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.linear(x.to(dtype), weight.to(dtype))


class RouterLogits(torch.autograd.Function):
    """X, Wr → X Wrᵀ, and X once more for the experts.

    Both terms of dX are accumulated by the router's GEMM, where autograd would add two (T, H)
    tensors (0.054 ms at 24576,1536,256,128,8). Kept: X, which is kept anyway.
    """

    @staticmethod
    def forward(ctx, x, weight, fp32_logits):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return router_gemm(x, weight, fp32_logits), x

    @staticmethod
    def backward(ctx, dlogits, dx):
        refuse_second_derivatives()
        need_dx, need_dweight, _ = ctx.needs_input_grad
        if dlogits is None:
            return dx, None, None
        x, weight = ctx.saved_tensors
        if dlogits.dtype != x.dtype:
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
    def backward(ctx, dscores, _):
        refuse_second_derivatives()
        if dscores is None:
            return None, None, None, None
        scores, ids, logits = ctx.saved_tensors
        if logits is None:
            logits = placeholder(scores, scores.shape[0], ctx.like[0], dtype=ctx.like[1])
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
    def backward(ctx, dscores, _):
        refuse_second_derivatives()
        if dscores is None:
            return (None,) * 8
        affinity, ids = ctx.saved_tensors
        logits = placeholder(affinity, affinity.shape[0], ctx.like[0], dtype=ctx.like[1])
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
    def backward(ctx, dloss):
        refuse_second_derivatives()
        return ops.balance_backward(dloss, *ctx.saved_tensors, *ctx.options), *([None] * 4)
