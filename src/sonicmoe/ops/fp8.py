"""The experts in FP8: e4m3 with scales, see `reference.fp8`.

dZ goes from down to up in e4m3, with its scales and once more transposed. X is quantized again in
the backward pass. The GEMMs of LoRA adapters are in bf16, from A and dZ as they were quantized.
"""

from functools import partial

import torch

from ..errors import bad_argument
from ..shapes import BLOCK, ceil_div, padded_rows
from ..tensors import E4M3, NO_LORA, Dz, DzResults, Weight
from ..validation import FP8_ALIGNMENT, check_fp8, fp8_backend
from .kinds import Forward, Gradients, Kind, register, weight_gradient
from .lora import (
    adapter,
    column_norm_bound,
    down_low_rank_gradients,
    gathered_low_rank,
    low_rank_of_dz,
    low_ranks_like,
    up_low_rank_gradients,
)
from .quantize import quantize_weight
from .registry import stages


class Fp8(Kind):
    """Weight gradients in FP8 too."""

    alignment = FP8_ALIGNMENT
    module = "fp8"
    bf16_dw = False

    @staticmethod
    def check(x, weights, backend):
        check_fp8(x, weights.up.weight, weights.down.weight)
        return fp8_backend(backend, x)

    @staticmethod
    def weights(w1, w2, x, how, kept):
        if kept is not None:
            if w1.dense is None or w2.dense is None:
                remedy = "Omit it: packed weights are frozen, and decoded by every GEMM."
                raise bad_argument("fp8_weights", "None with packed weights", "Fp8Weights", remedy)
            found = kept.quantized(w1.dense, w2.dense, how.backend)
            if found is not None:
                return found
        quantized = []
        for w, norms in ((w1, False), (w2, how.backward)):
            if w.w_scale is None:
                found = quantize_weight(w, how.keep_transposes, norms, how.backend)
                w = w._replace(w8=found[0], w8_t=found[1], w_scale=found[2], w_norm=found[3])
            quantized.append(w)
        return tuple(quantized)

    @staticmethod
    def kept_weight(w, how):
        """What is transposed, and the scales, with which the rest is quantized again.

        Where Z is recomputed, up takes a weight that is kept from call to call as it is.
        """
        return w if how.recompute and w.w8_t is not None else w._replace(w8=None)

    @staticmethod
    def forward(x, w, u, p, how, z_dtype):
        fp8 = stages(how.backend, "fp8")
        x8, x_scale, _ = fp8.quantize_rows(x, False)
        given = (w.weight, w.bias, adapter(u, w.lora_b), p, how.activation, how.gate_up, z_dtype)
        *of_z, a8, a_scale = fp8.up(x8, x_scale, *given)
        return Forward(a8, a_scale, *of_z, None if z_dtype is None else x_scale, u, None)

    @staticmethod
    def forward_like(x, w, next_lora_a, p, how):
        rows, (experts, n, _) = p.rows_of(x), w.weight.shape
        fp32 = partial(x.new_empty, dtype=torch.float32)
        inner = how.activation.intermediate_size(n)
        a_scale = fp32(ceil_div(inner, BLOCK), rows)
        z = zmax = zmax_columns = x_scale = None
        if how.z_dtype is not None:
            z, zmax = x.new_empty(rows, n, dtype=how.z_dtype), torch.empty_like(a_scale)
            zmax_columns, x_scale = fp32(experts, inner), fp32(x.shape[0])
        a = x.new_empty(rows, inner, dtype=E4M3)
        u1, u2 = low_ranks_like(x, rows, w.lora_a, next_lora_a)
        return Forward(a, a_scale, z, zmax, zmax_columns, x_scale, u1, u2)

    @staticmethod
    def low_rank(rows, lora_a, p, how):
        a = stages(how.backend, "fp8").dequantize_rows(*rows)
        gemms = stages(how.backend, "grouped_gemm")
        return gemms.down(a, Weight(lora_a), None, None, NO_LORA, p)

    @staticmethod
    def dz_like(new, rows, experts, n):
        fp32, e4m3 = partial(new, dtype=torch.float32), partial(new, dtype=E4M3)
        dz_t = e4m3(n, padded_rows(rows, experts))
        return Dz(e4m3(rows, n), fp32(rows), dz_t, fp32(experts, n))

    @classmethod
    def dz_needed(cls, needs):
        of_rows = needs.source or needs.bias or needs.lora or (needs.weight and cls.bf16_dw)
        return of_rows, needs.weight and not cls.bf16_dw

    @classmethod
    def down_backward(
        cls, dout, kept, w, u, scores, p, needs, dz, dz_t, main_grad, fp32, how
    ):  # fmt: skip
        fp8, gemms = stages(how.backend, "fp8"), stages(how.backend, "grouped_gemm")
        act, like = (how.activation, how.gate_up), w.weight.dense
        in_fp8 = needs.weight and not cls.bf16_dw
        v = gathered_low_rank(dout, None if w.lora_b is None else w.lora_b.mT, p, how.backend)
        lora = adapter(v, None if v is None else w.lora_a.mT)
        results = DzResults(dz, dz_t, in_fp8, needs.source)
        given = (dout, kept, w.weight, w.bias, scores, lora, column_norm_bound(w), p)
        found, of_dw, dscores = fp8.dz(*given, *act, results)
        a = dw = dbias = None
        if in_fp8:
            do8, *of_a = of_dw
            dw = weight_gradient(fp8, do8, of_a, like, p, "left", main_grad, fp32)
            del do8, of_a
        del of_dw
        if needs.lora_a or (needs.weight and not in_fp8):
            a = fp8.scored_activation(kept.z, kept.z_scale, scores, p, *act)
        if needs.weight and not in_fp8:
            dw = weight_gradient(gemms, dout, a, like, p, "left", main_grad, fp32)
        of_lora = down_low_rank_gradients(dout, v, a, u, w, scores, p, needs, how.backend)
        del a, v
        if needs.bias:
            dbias = gemms.bias_gradient(dout, scores, p, True, w.bias.dtype)
        return Gradients(dscores, dw, dbias, *of_lora), found

    @classmethod
    def up_backward(cls, dz, source, p, needs, main_grad, fp32, how):
        fp8, gemms = stages(how.backend, "fp8"), stages(how.backend, "grouped_gemm")
        (x, w, u), (dz8, dz_scale, *of_dw) = source, dz
        dx = dw = dbias = None
        lora, of_lora = NO_LORA, (None, None)
        if u is not None:
            rows = fp8.dequantize_rows(dz8, dz_scale)
            v = low_rank_of_dz(rows, w.lora_b, p, how.backend)
            lora = adapter(v, w.lora_a.mT)
            of_lora = up_low_rank_gradients(rows, v, source, p, needs, how.backend)
            del rows
        if needs.source:
            dx = fp8.dx(dz8, dz_scale, w.weight, lora, p, x.shape[0], how.slices)
        into = (w.weight.dense, p, "right", main_grad, fp32)
        if needs.weight and cls.bf16_dw:
            rows = fp8.dequantize_rows(dz8, dz_scale)
            dw = weight_gradient(gemms, rows, x, *into)
        elif needs.weight:
            dw = weight_gradient(fp8, of_dw, x, *into)
        if needs.bias:  # the sum of the rows of dz8, each times its scale
            dbias = gemms.bias_gradient(dz8, dz_scale, p, False, x.dtype)
        return Gradients(dx, dw, dbias, *of_lora)


class Fp8Bf16Dw(Fp8):
    """Weight gradients from operands in bf16."""

    bf16_dw = True


register("fp8", Fp8)
register("fp8_bf16_dw", Fp8Bf16Dw)
