"""Operands in FP8: e4m3 with scales, see `reference.fp8`.

dZ goes from `Down` to `Up` in e4m3, with its scales and once more transposed. X is quantized again
in the backward pass. The GEMMs of LoRA adapters are in bf16, from A and dZ as they were quantized.
"""

from functools import partial
from typing import NamedTuple

import torch

from .. import ops
from ..errors import bad_argument
from ..shapes import padded_rows
from ..tensors import E4M3, NO_LORA, Fp8Dz, Fp8DzResults, Fp8Kept, Fp8Weight, Lora, Packed
from ..validation import FP8_ALIGNMENT, check_fp8, fp8_backend
from .bf16 import weight_gradient
from .checkpoint import placeholder
from .fp8_weights import quantize_weights
from .lora import (
    column_norm_bound,
    down_low_rank_gradients,
    low_rank_of_dout,
    low_rank_of_dz,
    low_rank_of_x,
    up_low_rank_gradients,
)
from .main_grad import added_to_main_grad
from .operands import Forward, Gradients, Operands, register


class Operand(NamedTuple):
    """A parameter and its `Fp8Weight`; of that, values that are None are quantized again.

    A packed weight comes twice: GEMMs decode it.
    """

    weight: torch.Tensor | Packed
    quantized: Fp8Weight | Packed


class Rows(NamedTuple):
    a8: torch.Tensor
    a_scale: torch.Tensor


class Fp8(Operands):
    """Weight gradients in FP8 too."""

    Dz = Fp8Dz
    alignment = FP8_ALIGNMENT
    bf16_dw = False

    @staticmethod
    def check(x, weights, backend):
        check_fp8(x, weights.up.weight, weights.down.weight)
        return fp8_backend(backend, x)

    @staticmethod
    def operands(weights, x, how, fp8_weights):
        w1, w2 = weights.up.weight, weights.down.weight
        quantize = quantize_weights if fp8_weights is None else fp8_weights.quantized
        if fp8_weights is not None and (isinstance(w1, Packed) or isinstance(w2, Packed)):
            remedy = "Omit it: packed weights are frozen, and decoded by every GEMM."
            raise bad_argument("fp8_weights", "None with packed weights", "Fp8Weights", remedy)
        quantized = quantize(w1, w2, how.keep_transposes, how.backward, how.backend)
        return tuple(
            Operand(q if isinstance(q, Packed) else w, q)
            for w, q in zip((w1, w2), quantized, strict=True)
        )

    @staticmethod
    def kept_operand(operand, how):
        """What is transposed, and the scales, with which the rest is quantized again.

        Where Z is recomputed, up takes a weight that is kept from call to call as it is.
        """
        q = operand.quantized
        if isinstance(operand.weight, Packed):
            return operand._replace(quantized=Fp8Weight())
        if how.recompute and q.w8_t is not None:
            return operand
        return operand._replace(quantized=q._replace(w8=None))

    @staticmethod
    def up(x, w, operand, p, how):
        u, act = low_rank_of_x(x, w, p, how), (how.activation, how.gate_up)
        lora = NO_LORA if u is None else Lora(u, w.lora_b)
        x8, x_scale, _ = ops.quantize_rows(x, False, how.backend)
        z, zmax, zmax_columns, a8, a_scale = ops.fp8_up(
            x8, x_scale, operand.quantized, w.bias, lora, p, *act, how.z_dtype, how.backend
        )
        kept = None
        if how.z_dtype is not None:
            kept = Fp8Kept(z, zmax, zmax_columns, a_scale, x_scale)
        return Forward(Rows(a8, a_scale), kept, u)

    @staticmethod
    def low_rank(rows, lora_a, p, how):
        a = ops.dequantize_rows(rows.a8, *rows, how.backend)
        return ops.down(a, lora_a, None, None, NO_LORA, p, how.backend)

    @staticmethod
    def down(rows, operand, w, u, scores, p, tokens, how):
        given = (*rows, operand.quantized, w.bias)
        lora = NO_LORA if u is None else Lora(u, w.lora_b)
        if not p.is_gathered:
            return ops.fp8_gemm(*given, scores, lora, p, how.backend)
        if how.slices > 1:
            sliced = (scores, lora, p, tokens, how.slices, how.backend)
            return ops.fp8_down_and_combine(*given, *sliced)
        y = ops.fp8_gemm(*given, None, lora, p, how.backend)
        return ops.combine(y, scores, p.slot_row, p.token_start, tokens, how.backend)

    @staticmethod
    def dz_like(x, shape, p, how):
        rows, (experts, n, _) = p.rows_of(x), shape
        fp32, columns = partial(placeholder, x, dtype=torch.float32), padded_rows(rows, experts)
        dz8, dz_t = (placeholder(x, *size, dtype=E4M3) for size in ((rows, n), (n, columns)))
        return Fp8Dz(dz8, fp32(rows), dz_t, fp32(experts, n))

    @classmethod
    def dz_needed(cls, needs, how):
        of_rows = needs.source or needs.bias or needs.lora or (needs.weight and cls.bf16_dw)
        of_columns = needs.weight and not cls.bf16_dw
        return Fp8Dz(of_rows, of_rows, of_columns, of_columns)

    @staticmethod
    def recomputed(dout, source, p, how):
        act = (how.activation, how.gate_up)
        given = (source.x, *source.operand, source.bias, source.lora, p, *act)
        return Fp8Kept(*ops.fp8_recomputed(dout, *given, how.backend))

    @classmethod
    def down_backward(cls, dout, kept, operand, w, u, scores, p, needs, dz, gradient, how):
        (weight, q), act = operand, (how.activation, how.gate_up)
        in_fp8 = needs.weight and not cls.bf16_dw
        v = low_rank_of_dout(dout, w, p, how)
        lora = NO_LORA if v is None else Lora(v, w.lora_a.mT)
        results = Fp8DzResults(dz.dz8, dz.dz_t, in_fp8, needs.source)
        given = (dout, kept, weight, q, w.bias, scores, lora, column_norm_bound(w), p)
        *of_dz, a_t, a_t_scale, do8, dscores = ops.fp8_dz(*given, *act, results, how.backend)
        a = dw = dbias = None
        if in_fp8:
            dw = _weight_gradient(do8, a_t, a_t_scale, weight, p, False, gradient, how)
        del a_t, do8
        if needs.lora_a or (needs.weight and not in_fp8):
            a = ops.scored_activation(dout, kept.z, kept.zmax, scores, p, *act, how.backend)
        if needs.weight and not in_fp8:
            dw = weight_gradient(dout, a, weight, p, "left", gradient, how)
        of_lora = down_low_rank_gradients(dout, v, a, u, w, scores, p, needs, how)
        del a, v
        if needs.bias:
            dbias = ops.bias_gradient(dout, scores, p, True, w.bias.dtype, how.backend)
        return Gradients(dscores, dw, dbias, *of_lora), Fp8Dz(*of_dz)

    @classmethod
    def up_backward(cls, dz, source, lora_a, p, needs, gradient, how):
        x, (weight, q), backend = source.x, source.operand, how.backend
        of_rows, dx, dw, dbias = (dz.dz8, dz.dz_scale), None, None, None
        lora, of_lora = NO_LORA, (None, None)
        if source.u is not None:
            rows = ops.dequantize_rows(dz.dz8, *of_rows, backend)
            v = low_rank_of_dz(rows, source, p, how)
            lora = Lora(v, lora_a.mT)
            of_lora = up_low_rank_gradients(rows, v, source, lora_a, p, needs, how)
            del rows
        if needs.source:
            dx = ops.fp8_dx(*of_rows, weight, q, lora, p, x.shape[0], how.slices, backend)
        if needs.weight and cls.bf16_dw:
            rows = ops.dequantize_rows(dz.dz8, *of_rows, backend)
            dw = weight_gradient(rows, x, weight, p, "right", gradient, how)
        elif needs.weight:
            dw = _weight_gradient(x, dz.dz_t, dz.dz_t_scale, weight, p, True, gradient, how)
        if needs.bias:  # the sum of the rows of dz8, each times its scale
            dbias = ops.bias_gradient(*of_rows, p, False, x.dtype, backend)
        return Gradients(dx, dw, dbias, *of_lora)


class Fp8Bf16Dw(Fp8):
    """Weight gradients from operands in bf16."""

    bf16_dw = True


def _weight_gradient(rows, other_t, scale, weight, p, transposed: bool, gradient, how):
    """Like `bf16.weight_gradient`, from operands in FP8."""
    operands = (rows, other_t, scale)
    if gradient.main is not None:
        into = gradient.main.main_grad
        ops.fp8_weight_gradient_into(into, *operands, p, transposed, how.backend)
        return added_to_main_grad(gradient.main)
    how_to = (p, transposed, gradient.fp32, how.backend)
    return ops.fp8_weight_gradient(*operands, weight, *how_to)


register("fp8", Fp8)
register("fp8_bf16_dw", Fp8Bf16Dw)
