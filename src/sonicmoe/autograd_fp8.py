"""The experts in FP8: what is kept between forward and backward.

Two nodes, as in `autograd`. dZ goes from one to the other in e4m3, with its scales and once more
transposed: each is the gradient of a placeholder that `Fp8Up` returns and `Fp8Down` takes. X is
quantized again in the backward pass.
"""

import torch

from . import ops
from .autograd import _needed, refuse_second_derivatives
from .checkpoint import placeholder
from .fp8_weights import Fp8Weights
from .gradients import Fp8DownGradients, Fp8UpGradients
from .main_grad import added_to_main_grad, with_main_grad
from .permutation import Permutation
from .reference.fp8 import padded_rows

E4M3 = torch.float8_e4m3fn


class Fp8Up(torch.autograd.Function):
    """X, W1 → Z, zmax, A, a_scale, x_scale; placeholders of dZ, dz_scale, dZᵀ, dz_t_scale.

    Kept: X 2·T·H (the caller's own), the transposed W1 in e4m3, the row maps.
    """

    @staticmethod
    def forward(ctx, x, w1, q: Fp8Weights, p: Permutation, activation, gate_up, keep_z, backend):
        ctx.set_materialize_grads(False)
        ctx.main = with_main_grad(w1)
        x8, x_scale, _ = ops.quantize_rows(x, backend)
        z, zmax, a8, a_scale = ops.fp8_up(
            x8, x_scale, q.w1, q.w1_scale, p, activation, gate_up, keep_z, backend
        )
        if not keep_z:
            return None, None, a8, a_scale, None, None, None, None, None
        (rows, n), experts = z.shape, w1.shape[0]
        dz = (placeholder(z, rows, n, dtype=E4M3), placeholder(a_scale, rows))
        columns = padded_rows(rows, experts)
        dz_t = (placeholder(z, n, columns, dtype=E4M3), placeholder(a_scale, experts))
        need_dx, need_dw1 = ctx.needs_input_grad[:2]
        constant = (() if need_dx else dz) + (() if need_dw1 else dz_t)
        ctx.mark_non_differentiable(z, zmax, a8, a_scale, x_scale, *constant)
        ctx.save_for_backward(
            x, w1, q.w1_t, q.w1_scale, *p._replace(row_slot=None, counts=None).tensors
        )
        ctx.options = (p.tile_m, backend)
        return z, zmax, a8, a_scale, x_scale, *dz, *dz_t

    @staticmethod
    def backward(ctx, _z, _zmax, _a8, _a_scale, _x_scale, *dz):
        refuse_second_derivatives()
        if all(t is None for t in dz):
            return (None,) * 8
        x, w1, w1_t, w1_scale, *maps = ctx.saved_tensors
        tile_m, backend = ctx.options
        needs = Fp8UpGradients(*ctx.needs_input_grad[:2])
        given = (w1_t, w1_scale, Permutation(*maps, tile_m), needs)
        if needs.dw1 and ctx.main is not None:
            dx = ops.fp8_up_backward_into(ctx.main.main_grad, *dz, x, *given, backend)
            dw1 = added_to_main_grad(ctx.main)
        else:
            fp32_dw = w1.dtype == torch.float32
            dx, dw1 = ops.fp8_up_backward(*dz, x, w1, *given, fp32_dw, backend)
        return *_needed((dx, dw1), needs), *([None] * 6)


class Fp8Down(torch.autograd.Function):
    """What `Fp8Up` returned, scores, W2 → O.

    Kept: Z 2·R·N, zmax and a_scale 4·R·I/128 each, x_scale 4·T, scores 4·R, the transposed W2 in
    e4m3, the row maps 12·R. `deferred` is that of `checkpoint.deferred_output`.
    """

    @staticmethod
    def forward(
        ctx, z, zmax, a8, a_scale, x_scale, dz8, dz_scale, dz_t, dz_t_scale, scores, w2,
        q: Fp8Weights, p: Permutation, tokens, activation, gate_up, backend, deferred,
    ):  # fmt: skip
        ctx.main = with_main_grad(w2)
        maps = p._replace(token_start=None, counts=None).tensors
        ctx.save_for_backward(z, zmax, a_scale, x_scale, w2, q.w2_t, q.w2_scale, scores, *maps)
        ctx.options = (p.tile_m, activation, gate_up, backend)

        def output():
            if not p.is_gathered:
                return ops.fp8_gemm(a8, a_scale, q.w2, q.w2_scale, scores, p, backend)
            y = ops.fp8_gemm(a8, a_scale, q.w2, q.w2_scale, None, p, backend)
            return ops.combine(y, scores, p.slot_row, p.token_start, tokens, backend)

        if deferred is None:
            return output()
        deferred.append(output)
        return placeholder(a_scale, tokens, w2.shape[1], dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives()
        z, zmax, a_scale, x_scale, w2, w2_t, w2_scale, scores, *maps = ctx.saved_tensors
        tile_m, *act, backend = ctx.options
        need_dz, _, need_dz_t, _, need_dscores, need_dw2 = ctx.needs_input_grad[5:11]
        needs = Fp8DownGradients(need_dz, need_dz_t, need_dw2, need_dscores)
        kept = (dout, z, zmax, a_scale, x_scale)
        given = (w2_t, w2_scale, scores, Permutation(*maps, tile_m), *act, needs)
        if needs.dw2 and ctx.main is not None:
            *dz, ds = ops.fp8_down_backward_into(ctx.main.main_grad, *kept, *given, backend)
            dw2 = added_to_main_grad(ctx.main)
        else:
            fp32_dw = w2.dtype == torch.float32
            *dz, dw2, ds = ops.fp8_down_backward(*kept, w2, *given, fp32_dw, backend)
        found = (*dz, ds, dw2)
        return *([None] * 5), *_needed(found, ctx.needs_input_grad[5:11]), *([None] * 7)
