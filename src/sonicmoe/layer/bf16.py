"""Operands in the dtype of the data: bf16, fp16 or fp32."""

from typing import Any, NamedTuple

import torch

from .. import ops
from ..tensors import NO_LORA, DzResults, Lora, Packed
from .checkpoint import placeholder
from .lora import (
    down_low_rank_gradients,
    low_rank_of_dout,
    low_rank_of_dz,
    low_rank_of_x,
    up_low_rank_gradients,
)
from .main_grad import added_to_main_grad
from .operands import Forward, Gradient, Gradients, How, Operands, register


class Operand(NamedTuple):
    """A weight, rounded to the dtype of the data, or a packed one, which GEMMs decode."""

    weight: torch.Tensor | Packed


class Rows(NamedTuple):
    a: torch.Tensor


class Kept(NamedTuple):
    """Z; in e4m3 with its scales."""

    z: torch.Tensor | None
    z_scale: torch.Tensor | None


class Dz(NamedTuple):
    dz: Any


def weight_gradient(left, right, w, p, gathered: str, gradient: Gradient, how: How) -> Any:
    """Σ over an expert's rows of leftᵀ right, with the strides of w; where `gradient` says."""
    if gradient.main is not None:
        into = gradient.main.main_grad
        ops.weight_gradient_into(into, left, right, p, gathered, how.backend)
        return added_to_main_grad(gradient.main)
    return ops.weight_gradient(left, right, w, p, gathered, gradient.fp32, how.backend)


class Bf16(Operands):
    Dz = Dz

    @staticmethod
    def operands(weights, x, how, fp8_weights):
        return tuple(
            Operand(w if isinstance(w, Packed) else w.to(x.dtype))
            for w in (weights.up.weight, weights.down.weight)
        )

    @staticmethod
    def up(x, w, operand, p, how):
        u = low_rank_of_x(x, w, p, how)
        lora = NO_LORA if u is None else Lora(u, w.lora_b)
        act = (how.activation, how.gate_up)
        z, a, z_scale = ops.up(x, operand.weight, w.bias, lora, p, *act, how.z_dtype, how.backend)
        scale = z_scale if how.z_dtype not in (None, x.dtype) else None
        return Forward(Rows(a), None if how.z_dtype is None else Kept(z, scale), u)

    @staticmethod
    def low_rank(rows, lora_a, p, how):
        return ops.down(rows.a, lora_a, None, None, NO_LORA, p, how.backend)

    @staticmethod
    def down(rows, operand, w, u, scores, p, tokens, how):
        lora = NO_LORA if u is None else Lora(u, w.lora_b)
        if not p.is_gathered:
            return ops.down(rows.a, operand.weight, w.bias, scores, lora, p, how.backend)
        if how.slices > 1:
            sliced = (scores, lora, p, tokens, how.slices, how.backend)
            return ops.down_and_combine(rows.a, operand.weight, w.bias, *sliced)
        y = ops.down(rows.a, operand.weight, w.bias, None, lora, p, how.backend)
        return ops.combine(y, scores, p.slot_row, p.token_start, tokens, how.backend)

    @staticmethod
    def dz_like(x, shape, p, how):
        return Dz(placeholder(x, p.rows_of(x), shape[1]))

    @staticmethod
    def dz_needed(needs, how):
        return Dz(any(needs))

    @staticmethod
    def recomputed(dout, source, p, how):
        x, operand, bias = source.x, source.operand, source.bias
        act = (how.activation, how.gate_up)
        z = ops.recomputed_z(dout, x, operand.weight, bias, source.lora, p, *act, how.backend)
        return Kept(z, None)

    @staticmethod
    def down_backward(dout, kept, operand, w, u, scores, p, needs, dz, gradient, how):
        v = low_rank_of_dout(dout, w, p, how)
        lora = NO_LORA if v is None else Lora(v, w.lora_a.mT)
        results = DzResults(dz.dz, needs.weight or bool(needs.lora_a), needs.source)
        weight, act = operand.weight, (how.activation, how.gate_up)
        found = a = dscores = dw = dbias = None
        if any(results):
            found, a, dscores = ops.dz(
                dout, *kept, weight, w.bias, scores, lora, p, *act, results, how.backend
            )
        if needs.weight:
            dw = weight_gradient(dout, a, weight, p, "left", gradient, how)
        of_lora = down_low_rank_gradients(dout, v, a, u, w, scores, p, needs, how)
        del a, v
        if needs.bias:
            dbias = ops.bias_gradient(dout, scores, p, True, w.bias.dtype, how.backend)
        return Gradients(dscores, dw, dbias, *of_lora), Dz(found)

    @staticmethod
    def up_backward(dz, source, lora_a, p, needs, gradient, how):
        (dz,), weight, backend = dz, source.operand.weight, how.backend
        dx = dw = dbias = None
        v = low_rank_of_dz(dz, source, p, how)
        if needs.source:
            lora = NO_LORA if v is None else Lora(v, lora_a.mT)
            dx = ops.dx(dz, weight, lora, p, source.x.shape[0], how.slices, backend)
        of_lora = up_low_rank_gradients(dz, v, source, lora_a, p, needs, how)
        if needs.weight:
            dw = weight_gradient(dz, source.x, weight, p, "right", gradient, how)
        if needs.bias:
            dbias = ops.bias_gradient(dz, None, p, False, source.x.dtype, backend)
        return Gradients(dx, dw, dbias, *of_lora)


register(None, Bf16)
