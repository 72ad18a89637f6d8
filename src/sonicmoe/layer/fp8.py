"""Operands in FP8: e4m3 with scales, see `reference.fp8`.

dZ goes from `Down` to `Up` in e4m3, with its scales and once more transposed. X is quantized again
in the backward pass.
"""

from functools import partial
from typing import NamedTuple

import torch

from .. import ops
from ..errors import bad_argument
from ..shapes import padded_rows
from ..tensors import E4M3, Fp8Dz, Fp8DzResults, Fp8Kept, Fp8Weight
from ..validation import check_fp8, fp8_backend
from .bf16 import weight_gradient
from .checkpoint import placeholder
from .fp8_weights import quantize_weights
from .main_grad import added_to_main_grad
from .operands import Forward, Gradients, Operands, register


class Operand(NamedTuple):
    """A parameter and its `Fp8Weight`; of that, fields that are None are quantized again."""

    weight: torch.Tensor
    quantized: Fp8Weight


class Rows(NamedTuple):
    a8: torch.Tensor
    a_scale: torch.Tensor


class Fp8(Operands):
    """Weight gradients in FP8 too."""

    Dz = Fp8Dz
    bf16_dw = False

    @staticmethod
    def check(x, weights, has_lora, backend):
        if has_lora:
            remedy = "Leave the adapters or precision='fp8' out."
            raise bad_argument("precision", "None with LoRA on the experts", "'fp8'", remedy)
        (w1, b1, *_), (w2, b2, *_) = weights.up, weights.down
        check_fp8(x, w1, w2, b1, b2)
        return fp8_backend(backend, x)

    @staticmethod
    def operands(weights, x, how, fp8_weights):
        w1, w2 = weights.up.weight, weights.down.weight
        quantize = quantize_weights if fp8_weights is None else fp8_weights.quantized
        q1, q2 = quantize(w1, w2, how.z_dtype is not None, how.backend)
        return Operand(w1, q1), Operand(w2, q2)

    @staticmethod
    def kept_operand(operand, how):
        """The transpose alone, unless Z is recomputed: then all of a kept weight, or nothing."""
        q = operand.quantized
        if not how.recompute:
            return operand._replace(quantized=q._replace(w8=None))
        return operand if q.w8_t is not None else operand._replace(quantized=Fp8Weight())

    @staticmethod
    def up(x, w, operand, p, how):
        x8, x_scale, _ = ops.quantize_rows(x, False, how.backend)
        z, zmax, zmax_columns, a8, a_scale = ops.fp8_up(
            x8, x_scale, operand.quantized, p, how.activation, how.gate_up, how.z_dtype, how.backend
        )
        kept = None
        if how.z_dtype is not None:
            kept = Fp8Kept(z, zmax, zmax_columns, a_scale, x_scale)
        return Forward(Rows(a8, a_scale), kept, None)

    @staticmethod
    def down(rows, operand, w, u, scores, p, tokens, how):
        q = operand.quantized
        if not p.is_gathered:
            return ops.fp8_gemm(*rows, q, scores, p, how.backend)
        if how.slices > 1:
            sliced = (scores, p, tokens, how.slices, how.backend)
            return ops.fp8_down_and_combine(*rows, q, *sliced)
        y = ops.fp8_gemm(*rows, q, None, p, how.backend)
        return ops.combine(y, scores, p.slot_row, p.token_start, tokens, how.backend)

    @staticmethod
    def dz_like(x, shape, p, how):
        rows, (experts, n, _) = p.rows_of(x), shape
        fp32, columns = partial(placeholder, x, dtype=torch.float32), padded_rows(rows, experts)
        dz8, dz_t = (placeholder(x, *size, dtype=E4M3) for size in ((rows, n), (n, columns)))
        return Fp8Dz(dz8, fp32(rows), dz_t, fp32(experts, n))

    @classmethod
    def dz_needed(cls, needs, how):
        of_rows = needs.source or (needs.weight and cls.bf16_dw)
        of_columns = needs.weight and not cls.bf16_dw
        return Fp8Dz(of_rows, of_rows, of_columns, of_columns)

    @staticmethod
    def recomputed(dout, source, p, how):
        weight, q = source.operand
        act = (how.activation, how.gate_up)
        return Fp8Kept(*ops.fp8_recomputed(dout, source.x, weight, q, p, *act, how.backend))

    @classmethod
    def down_backward(cls, dout, kept, operand, w, u, scores, p, needs, dz, gradient, how):
        (weight, q), act = operand, (how.activation, how.gate_up)
        in_fp8 = needs.weight and not cls.bf16_dw
        results = Fp8DzResults(dz.dz8, dz.dz_t, in_fp8, needs.source)
        *of_dz, a_t, a_t_scale, do8, dscores = ops.fp8_dz(
            dout, kept, weight, q, scores, p, *act, results, how.backend
        )
        dw = None
        if in_fp8:
            dw = _weight_gradient(do8, a_t, a_t_scale, weight, p, False, gradient, how)
        elif needs.weight:
            a = ops.scored_activation(dout, kept.z, kept.zmax, scores, p, *act, how.backend)
            dw = weight_gradient(dout, a, weight, p, "left", gradient, how)
        return Gradients(dscores, dw, None, None, None), Fp8Dz(*of_dz)

    @classmethod
    def up_backward(cls, dz, source, lora_a, p, needs, gradient, how):
        x, (weight, q), backend = source.x, source.operand, how.backend
        dx = dw = None
        if needs.source:
            rows = (dz.dz8, dz.dz_scale)
            dx = ops.fp8_dx(*rows, weight, q, p, x.shape[0], how.slices, backend)
        if needs.weight and cls.bf16_dw:
            rows = ops.dequantize_rows(dz.dz8, dz.dz8, dz.dz_scale, backend)
            dw = weight_gradient(rows, x, weight, p, "right", gradient, how)
        elif needs.weight:
            dw = _weight_gradient(x, dz.dz_t, dz.dz_t_scale, weight, p, True, gradient, how)
        return Gradients(dx, dw, None, None, None)


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
