"""The experts in FP8: what is kept between forward and backward.

Two nodes, as in `autograd`. dZ goes from one to the other in e4m3, with its scales and once more
transposed: each is the gradient of a placeholder that `Fp8Up` returns and `Fp8Down` takes. X is
quantized again in the backward pass.
"""

from collections.abc import Sequence

import torch

from . import ops
from .autograd import Options, _needed, refuse_second_derivatives
from .checkpoint import placeholder
from .fp8_tensors import E4M3, Fp8Dz, Fp8Kept, Fp8Weight
from .gradients import Fp8DownGradients, Fp8UpGradients
from .main_grad import added_to_main_grad, with_main_grad
from .permutation import Permutation
from .reference.fp8 import padded_rows


def _kept_weight(w: Fp8Weight, keep_z: str) -> Fp8Weight:
    """The transpose alone, unless Z is recomputed: then all of a cached weight, or nothing."""
    if keep_z != "recompute":
        return w._replace(w8=None)
    return w if w.w8_t is not None else Fp8Weight()


def _dense(saved: Sequence) -> list:
    """Kernels compute addresses from shapes, and a saved-tensor hook may return any strides."""
    return [None if t is None else t.contiguous() for t in saved]


class Fp8Up(torch.autograd.Function):
    """X, W1 → A, a_scale; placeholders of the fields of `Fp8Dz`; if kept, the fields of `Fp8Kept`
    without a_scale.

    Kept: X 2·T·H (the caller's own), the row maps and `_kept_weight` of W1.
    """

    @staticmethod
    def forward(ctx, x, w1, w: Fp8Weight, p: Permutation, options: Options):
        ctx.set_materialize_grads(False)
        ctx.main, ctx.tile_m, ctx.options = with_main_grad(w1), p.tile_m, options
        keep_z, backend = options.keep_z, options.backend
        x8, x_scale, _ = ops.quantize_rows(x, False, backend)
        z, zmax, zmax_columns, a8, a_scale = ops.fp8_up(
            x8, x_scale, w, p, options.activation, options.gate_up, keep_z, backend
        )
        if keep_z == "no":
            ctx.mark_non_differentiable(a8, a_scale)
            return a8, a_scale
        rows, (experts, n, _) = a8.shape[0], w1.shape
        dz = (placeholder(x, rows, n, dtype=E4M3), placeholder(a_scale, rows))
        columns = padded_rows(rows, experts)
        dz_t = (placeholder(x, n, columns, dtype=E4M3), placeholder(a_scale, experts, n))
        need_dx, need_dw1 = ctx.needs_input_grad[:2]
        need_dz = need_dx or (need_dw1 and options.bf16_dw)
        need_dz_t = need_dw1 and not options.bf16_dw
        constant = (() if need_dz else dz) + (() if need_dz_t else dz_t)
        kept = () if keep_z == "recompute" else (z, zmax, zmax_columns, x_scale)
        ctx.mark_non_differentiable(a8, a_scale, *constant, *kept)
        maps = p._replace(row_slot=None, counts=None).tensors
        ctx.save_for_backward(x, w1, *_kept_weight(w, keep_z), *maps)
        return a8, a_scale, *dz, *dz_t, *kept

    @staticmethod
    def backward(ctx, _a8, _a_scale, *grads):
        refuse_second_derivatives()
        dz = Fp8Dz(*grads[:4])
        if all(t is None for t in dz):
            return (None,) * 5
        x, w1, *rest = ctx.saved_tensors
        w, p = Fp8Weight(*_dense(rest[:4])), Permutation(*_dense(rest[4:]), ctx.tile_m)
        needs = Fp8UpGradients(*ctx.needs_input_grad[:2])
        options = (ctx.options.bf16_dw, ctx.options.slices, ctx.options.backend)
        if needs.dw1 and ctx.main is not None:
            dx = ops.fp8_up_backward_into(ctx.main.main_grad, dz, x, w1, w, p, needs, *options)
            dw1 = added_to_main_grad(ctx.main)
        else:
            fp32_dw = w1.dtype == torch.float32
            dx, dw1 = ops.fp8_up_backward(dz, x, w1, w, p, needs, fp32_dw, *options)
        return *_needed((dx, dw1), needs), None, None, None


class Fp8Down(torch.autograd.Function):
    """Scores, W2 and what `Fp8Up` returned → O.

    Kept: Z 2·R·N, in e4m3 R·N, zmax and a_scale 4·R·I/128 each, zmax_columns 4·E·I, x_scale 4·T,
    scores 4·R, the row maps 12·R and `_kept_weight` of W2. `deferred` is that of
    `checkpoint.deferred_output`. `rest` are the placeholders of dZ, then what else `Fp8Up` kept; in
    its place X, W1 and the `Fp8Weight` of W1, if Z is recomputed.
    """

    @staticmethod
    def forward(
        ctx, scores, w2, w: Fp8Weight, p: Permutation, tokens, options, deferred, a8, a_scale, *rest
    ):
        ctx.main, ctx.tile_m, ctx.options = with_main_grad(w2), p.tile_m, options
        keep_z, slices, backend = options.keep_z, options.slices, options.backend
        source = rest[4:]
        if keep_z == "recompute":
            x, w1, w_1 = source
            source = (x, w1, *_kept_weight(w_1, keep_z))
        elif source:
            z, zmax, zmax_columns, x_scale = source
            source = Fp8Kept(z, zmax, zmax_columns, a_scale, x_scale)
        maps = p._replace(token_start=None, counts=None).tensors
        ctx.save_for_backward(scores, w2, *_kept_weight(w, keep_z), *maps, *source)

        def output():
            if not p.is_gathered:
                return ops.fp8_gemm(a8, a_scale, w, scores, p, backend)
            if slices > 1:
                sliced = (scores, p, tokens, slices, backend)
                return ops.fp8_down_and_combine(a8, a_scale, w, *sliced)
            y = ops.fp8_gemm(a8, a_scale, w, None, p, backend)
            return ops.combine(y, scores, p.slot_row, p.token_start, tokens, backend)

        if deferred is None:
            return output()
        deferred.append(output)
        return placeholder(a_scale, tokens, w2.shape[1], dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives()
        scores, w2, *rest = ctx.saved_tensors
        w, p = Fp8Weight(*_dense(rest[:4])), Permutation(*_dense(rest[4:11]), ctx.tile_m)
        source = rest[11:]
        options = ctx.options
        act, backend = (options.activation, options.gate_up), options.backend
        if options.keep_z == "recompute":
            x, w1, *of_w1 = source
            w_1 = Fp8Weight(*_dense(of_w1))
            source = ops.fp8_recomputed(dout, x, w1, w_1, p, *act, backend)
        need_dscores, need_dw2 = ctx.needs_input_grad[:2]
        need_dz, _, need_dz_t, _ = ctx.needs_input_grad[9:13]
        needs = Fp8DownGradients(need_dz, need_dz_t, need_dw2, need_dscores)
        given = (dout, Fp8Kept(*_dense(source)), w2, w, scores, p, *act, needs)
        if needs.dw2 and ctx.main is not None:
            main_grad = ctx.main.main_grad
            *dz, ds = ops.fp8_down_backward_into(main_grad, *given, options.bf16_dw, backend)
            dw2 = added_to_main_grad(ctx.main)
        else:
            fp32_dw = w2.dtype == torch.float32
            *dz, dw2, ds = ops.fp8_down_backward(*given, fp32_dw, options.bf16_dw, backend)
        ds, dw2 = _needed((ds, dw2), ctx.needs_input_grad[:2])
        dz = _needed((*dz,), ctx.needs_input_grad[9:13])
        return ds, dw2, *([None] * 7), *dz, *([None] * (len(ctx.needs_input_grad) - 13))
