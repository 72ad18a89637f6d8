"""The experts in the dtype of the data: bf16, fp16 or fp32."""

import torch

from ..shapes import BLOCK, ceil_div
from ..tensors import E4M3, NO_LORA, Dz, DzResults, Weight
from .kinds import Forward, Gradients, Kind, register, weight_gradient
from .lora import (
    adapter,
    down_low_rank_gradients,
    gathered_low_rank,
    low_rank_of_dz,
    low_ranks_like,
    up_low_rank_gradients,
)
from .registry import stages


class Bf16(Kind):
    @staticmethod
    def weights(w1, w2, x, how, kept):
        return _rounded(w1, x.dtype), _rounded(w2, x.dtype)

    @staticmethod
    def forward(x, w, u, p, how, z_dtype):
        given = (x, w.weight, w.bias, adapter(u, w.lora_b), p, how.activation, how.gate_up)
        z, a, z_scale = stages(how.backend, "grouped_gemm").up(*given, z_dtype)
        return Forward(a, None, z, z_scale, None, None, u, None)

    @staticmethod
    def forward_like(x, w, next_lora_a, p, how):
        rows, n = p.rows_of(x), w.weight.shape[1]
        a = x.new_empty(rows, how.activation.intermediate_size(n))
        z = z_scale = None
        if how.z_dtype is not None:
            z = x.new_empty(rows, n, dtype=how.z_dtype)
        if how.z_dtype == E4M3:
            z_scale = x.new_empty(ceil_div(n, BLOCK), rows, dtype=torch.float32)
        u1, u2 = low_ranks_like(x, rows, w.lora_a, next_lora_a)
        return Forward(a, None, z, z_scale, None, None, u1, u2)

    @staticmethod
    def low_rank(rows, lora_a, p, how):
        gemms = stages(how.backend, "grouped_gemm")
        return gemms.down(rows.values, Weight(lora_a), None, None, NO_LORA, p)

    @staticmethod
    def dz_like(new, rows, experts, n):
        return Dz(new(rows, n))

    @staticmethod
    def dz_needed(needs):
        return any(needs), False

    @classmethod
    def down_backward(
        cls, dout, kept, w, u, scores, p, needs, dz, dz_t, main_grad, fp32, how
    ):  # fmt: skip
        gemms, act = stages(how.backend, "grouped_gemm"), (how.activation, how.gate_up)
        v = gathered_low_rank(dout, None if w.lora_b is None else w.lora_b.mT, p, how.backend)
        lora = adapter(v, None if v is None else w.lora_a.mT)
        results = DzResults(dz, False, needs.weight or needs.lora_a, needs.source)
        found = a = dscores = dw = dbias = None
        if any(results):
            found, a, dscores = gemms.dz(
                dout, kept.z, kept.z_scale, w.weight, w.bias, scores, lora, p, *act, results
            )
        if needs.weight:
            into = (w.weight.dense, p, "left", main_grad, fp32)
            dw = weight_gradient(gemms, dout, a, *into)
        of_lora = down_low_rank_gradients(dout, v, a, u, w, scores, p, needs, how.backend)
        del a, v
        if needs.bias:
            dbias = gemms.bias_gradient(dout, scores, p, True, w.bias.dtype)
        return Gradients(dscores, dw, dbias, *of_lora), Dz(found)

    @classmethod
    def up_backward(cls, dz, source, p, needs, main_grad, fp32, how):
        gemms, (x, w, _), rows = stages(how.backend, "grouped_gemm"), source, dz.values
        dx = dw = dbias = None
        v = low_rank_of_dz(rows, w.lora_b, p, how.backend)
        if needs.source:
            lora = adapter(v, None if v is None else w.lora_a.mT)
            dx = gemms.dx(rows, w.weight, lora, p, x.shape[0], how.slices)
        of_lora = up_low_rank_gradients(rows, v, source, p, needs, how.backend)
        if needs.weight:
            into = (w.weight.dense, p, "right", main_grad, fp32)
            dw = weight_gradient(gemms, rows, x, *into)
        if needs.bias:
            dbias = gemms.bias_gradient(rows, None, p, False, x.dtype)
        return Gradients(dx, dw, dbias, *of_lora)


def _rounded(w: Weight, dtype: torch.dtype) -> Weight:
    """In the dtype of the data; a packed weight is decoded to it."""
    return w if w.dense is None or w.dense.dtype == dtype else Weight(w.dense.to(dtype))


register(None, Bf16)
