"""What is kept between forward and backward, and nothing else.

Two nodes, so that Z is free again before dX̃ is allocated: `Down` keeps Z and releases it when its
backward returns; `Up` needs only X. In a checkpoint there is a third one, see `checkpoint`.
"""

from typing import NamedTuple

import torch

from . import ops
from .checkpoint import placeholder
from .enums import ActivationType
from .gradients import DownGradients, UpGradients
from .main_grad import added_to_main_grad, with_main_grad
from .permutation import Permutation


class Options(NamedTuple):
    """How the nodes of the experts compute."""

    activation: ActivationType
    gate_up: str
    keep_z: str  # that of `MemoryPolicy`, or "no" without a backward pass
    slices: int
    bf16_dw: bool  # weight gradients of experts in FP8 from operands in bf16
    backend: str


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


def _rounded(weight: torch.Tensor, data: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The weight in the dtype of the data, and whether its gradient is fp32 all the same.

    PyTorch would round the gradient as well, and cast it back: 8% of a layer at
    24576,1536,256,128,8.
    """
    if weight.dtype == data.dtype:
        return weight, False
    return weight.to(data.dtype), weight.dtype == torch.float32


class Up(torch.autograd.Function):
    """X, W1, b1 → Z, A; also Z in e4m3 and its scales. Kept: X 2·T·H (the caller's), the row maps.

    Only Z carries a gradient; it is a placeholder if it is not kept as it is. W1 in another dtype
    than X is rounded here, and kept so.
    """

    @staticmethod
    def forward(ctx, x, w1, b1, p: Permutation, options: Options):
        # Else autograd would fill R·I zeros for A, which has no gradient.
        ctx.set_materialize_grads(False)
        ctx.main = with_main_grad(w1)
        w1, ctx.fp32_dw = _rounded(w1, x)
        activation, gate_up, keep_z, slices, _, backend = options
        z, a, z_scale = ops.up(x, w1, b1, p, activation, gate_up, keep_z, backend)
        ctx.save_for_backward(x, w1, *p._replace(row_slot=None, counts=None).tensors)
        ctx.options = (p.tile_m, slices, backend)
        if keep_z == "fp8":
            ctx.mark_non_differentiable(a, z, z_scale)
            return placeholder(a, *z.shape), a, z, z_scale
        ctx.mark_non_differentiable(a)
        return placeholder(a, a.shape[0], w1.shape[1]) if keep_z == "recompute" else z, a

    @staticmethod
    def backward(ctx, dz, *_):
        refuse_second_derivatives()
        if dz is None:
            return (None,) * 5
        x, w1, *maps = ctx.saved_tensors
        tile_m, *options = ctx.options
        p = Permutation(*maps, tile_m)
        needs = UpGradients(*ctx.needs_input_grad[:3])
        if needs.dw1 and ctx.main is not None:
            dx, db1 = ops.up_backward_into(ctx.main.main_grad, dz, x, w1, p, needs, *options)
            dw1 = added_to_main_grad(ctx.main)
        else:
            dx, dw1, db1 = ops.up_backward(dz, x, w1, p, needs, ctx.fp32_dw, *options)
        return *_needed((dx, dw1, db1), needs), None, None


class Down(torch.autograd.Function):
    """Z, A, scores, W2, b2 → O. Kept: Z 2·R·N, scores 4·R, the row maps 12·R. Not A, not Y.

    For rows that arrive sorted, O has one row for each, times its score where there are scores.
    `deferred` is that of `checkpoint.deferred_output`. `source` is kept in the place of Z: Z in
    e4m3 and its scales, or X, W1 and b1, from which Z is computed again. It gets no gradient here.
    """

    @staticmethod
    def forward(
        ctx, z, a, scores, w2, b2, p: Permutation, tokens, options: Options, deferred, *source
    ):
        activation, gate_up, _, slices, _, backend = options
        ctx.main = with_main_grad(w2)
        w2, ctx.fp32_dw = _rounded(w2, a)
        maps = p._replace(token_start=None, counts=None).tensors
        ctx.save_for_backward(w2, b2, scores, *maps, *(source or (z,)))
        ctx.options = (p.tile_m, activation, gate_up, backend)

        def output():
            if not p.is_gathered:
                return ops.down(a, w2, b2, scores, p, backend)
            if slices > 1:
                return ops.down_and_combine(a, w2, b2, scores, p, tokens, slices, backend)
            y = ops.down(a, w2, b2, None, p, backend)
            return ops.combine(y, scores, p.slot_row, p.token_start, tokens, backend)

        if deferred is None:
            return output()
        deferred.append(output)
        return placeholder(a, tokens, w2.shape[1])

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives()
        w2, b2, scores, *rest = ctx.saved_tensors
        tile_m, *act, backend = ctx.options
        p, source = Permutation(*rest[:7], tile_m), rest[7:]
        z, z_scale = source[0], source[1] if len(source) == 2 else None
        if len(source) == 3:
            x, w1, b1 = source
            z = ops.recomputed_z(dout, x, _rounded(w1, x)[0], b1, p, *act, backend)
        saved = (z, z_scale, w2, b2, scores, p)
        need_dz, _, need_dscores, need_dw2, need_db2 = ctx.needs_input_grad[:5]
        needs = DownGradients(need_dz, need_dw2, need_db2, need_dscores)
        if needs.dw2 and ctx.main is not None:
            main_grad = ctx.main.main_grad
            dz, db2, ds = ops.down_backward_into(main_grad, dout, *saved, *act, needs, backend)
            dw2 = added_to_main_grad(ctx.main)
        else:
            dz, dw2, db2, ds = ops.down_backward(dout, *saved, *act, needs, ctx.fp32_dw, backend)
        dz, dw2, db2, ds = _needed((dz, dw2, db2, ds), needs)
        return dz, None, ds, dw2, db2, *([None] * (len(ctx.needs_input_grad) - 5))


def _needed(found: tuple, needs: tuple[bool, ...]) -> tuple:
    """None where an operator returned an empty tensor for a gradient that is not needed."""
    return tuple([t if need else None for t, need in zip(found, needs, strict=True)])
