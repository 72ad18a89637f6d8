"""Launches of the experts in FP8 on Hopper.

Functions without an underscore have the names, parameters and results of the operators in
`ops.fp8`.
"""

from functools import lru_cache

import torch

from ..enums import ActivationType
from ..kernels.activation import value_of
from ..kernels.hopper.fp8_gemm import fp8_gemm_kernel
from ..kernels.hopper.fp8_up import SLICE, fp8_up_kernel
from ..shapes import BLOCK, ceil_div
from ..tensors import E4M3, Dz, Kept, Permutation, Weight
from . import fp8_wgrad, grouped_gemm, memory
from .boxes import (
    laid_out,
    low_rank,
    ragged_boxes,
    row_boxes,
    weight_boxes,
    z_boxes,
)
from .descriptors import Boxes
from .fp8_dz import dz_gemm
from .fp8_scales import dz_scales
from .grouped_gemm import column_slices, combine, zero_tail
from .launcher import Bound, launch
from .quantize import (
    checked_scales,
    dequantize_rows,
    quantize_rows,
    quantize_weight,
    quantize_weight_into,
    scored_activation,
)
from .weights import decoded_once, parts

__all__ = [  # operators too
    "checked_scales",
    "dequantize_rows",
    "quantize_rows",
    "quantize_weight",
    "quantize_weight_into",
    "scored_activation",
]

_CONSUMER_M = 64


# Columns of U and B in a step: in bf16, with the bytes of BLOCK columns in e4m3.
_BLOCK_R = BLOCK // 2


@lru_cache(maxsize=1024)
def _up_boxes(dtype, shape, gate_up, block_k) -> Boxes:
    """Boxes of 128 columns of A, both gates and their ups, of contiguous (E, N, K) weights."""
    experts, columns, depth = shape
    if gate_up is None:
        return weight_boxes(dtype, shape, (columns * depth, depth, 1), BLOCK, block_k)
    inner = columns // 2
    half, one = (inner * depth, depth) if gate_up == "concatenated" else (depth, 2 * depth)
    strides = (columns * depth, half, one, 1)
    return laid_out(dtype, (experts, 2, inner, depth), strides, (1, 2, BLOCK, block_k))


@lru_cache(maxsize=1024)
def _up(shape, activation: ActivationType, gate_up, z_dtype, rank):
    """The kernel; boxes of W1, Z and A; columns of Z in a tile."""
    _, columns, hidden = shape
    inner = activation.intermediate_size(columns)
    options = {"GATE_UP": gate_up, "ACTIVATION": value_of(activation, E4M3)}
    options |= {"KEEP_Z": z_dtype is not None}
    sizes = {"H": hidden, "N": columns, "RANK": rank, "STAGES": 4}
    kernel = Bound(fp8_up_kernel, **sizes, **options, num_warps=4)
    gated = activation.is_gated
    weights = _up_boxes(E4M3, shape, gate_up, BLOCK)
    width = 2 * SLICE.value if gate_up == "interleaved" else SLICE.value
    z = z_boxes(z_dtype or torch.bfloat16, columns, width, gate_up)
    a = ragged_boxes(E4M3, (inner,), (inner, 1), (_CONSUMER_M, BLOCK))
    return kernel, weights, z, a, BLOCK * (1 + gated)


def up(
    x8, x_scale, w, b1, lora, p: Permutation, activation: ActivationType, gate_up, z_dtype
):  # fmt: skip
    experts, columns, _ = w.shape
    rows, device = p.rows_of(x8), x8.device
    inner = activation.intermediate_size(columns)
    blocks = ceil_div(inner, BLOCK)
    z = zmax = zmax_columns = column_bits = None
    if z_dtype is not None:
        z = memory.empty((rows, columns), z_dtype, device)
        zmax = memory.empty((blocks, rows), torch.float32, device)
        column_bits = memory.empty((experts, inner), torch.int32, device).zero_()
        zmax_columns = column_bits.view(torch.float32)
    a = memory.empty((rows, inner), E4M3, device)
    a_scale = memory.empty((blocks, rows), torch.float32, device)
    if rows == 0:
        return z, zmax, zmax_columns, a, a_scale
    gate_up = gate_up if activation.is_gated else None
    source = x8 if p.is_gathered else row_boxes(x8, _CONSUMER_M, BLOCK)
    # If Z is not stored, any address of the right dtype will do.
    z_target = memory.empty((8, 8), torch.bfloat16, device) if z is None else z
    for part in parts(w, E4M3, b1, lora, p):
        w8, bias, low, q, _ = part
        kernel, weights, z_boxes, a_boxes, width = _up(
            w8.shape, activation, gate_up, z_dtype, lora.rank
        )
        adapter = low_rank(low, "nk", BLOCK, _BLOCK_R)
        if lora.rank:
            u, (b, _) = adapter
            adapter = u, (b, _up_boxes(b.dtype, b.shape, gate_up, _BLOCK_R))
        sources = (source, p.row_token, (w8, weights), *adapter)
        work = (p.tiles.shape[0] - 1) * ceil_div(columns, width)
        grid = (max(1, min(work, grouped_gemm.target_of(x8).processors)),)
        args = (x_scale, part.of(w.w_scale), bias, (z_target, z_boxes), zmax, part.of(column_bits))
        launch(kernel, grid, *sources, *args, (a, a_boxes), a_scale, rows, q.tiles)
        del part, w8, sources
    return z, zmax, zmax_columns, a, a_scale


@lru_cache(maxsize=1024)
def _gemm(shape, strides, block_n, stages, block_scales, rank):
    """The kernel; boxes of W, which may be a slice of N, and Y."""
    _, columns, depth = shape
    sizes = {"K": depth, "N": columns, "RANK": rank, "BLOCK_N": block_n, "STAGES": stages}
    kernel = Bound(fp8_gemm_kernel, **sizes, BLOCK_SCALES=block_scales, num_warps=4)
    y = ragged_boxes(torch.bfloat16, (columns,), (columns, 1), (_CONSUMER_M, block_n))
    return kernel, weight_boxes(E4M3, shape, strides, block_n, BLOCK), y


def _tile_width(columns, depth, block_scales) -> int:
    # Narrow tiles for dX with K = 512: at 24576,1536,256,128,8 it takes 0.360 ms instead of 0.395.
    return 128 if columns <= 128 or (not block_scales and 256 < depth <= 512) else 256


def down(
    a8, a_scale, w, b2, row_scores, lora, p: Permutation, block_n=None, stages=None,
    columns=slice(None),
):  # fmt: skip
    """`block_n` and `stages` are there to be measured.

    b2 and the adapter have the `columns` of Y that are computed; w has all.
    """
    rows, n = a8.shape[0], w.shape[1]
    n = len(range(n)[columns])
    y = memory.empty((rows, n), torch.bfloat16, a8.device)
    if rows == 0:
        return y
    block_scales = a_scale.shape[0] > 1
    block_n = block_n or _tile_width(n, a8.shape[1], block_scales)
    stages = stages or (6 if block_n == 128 else 3)
    source = row_boxes(a8, _CONSUMER_M, BLOCK)
    work = (p.tiles.shape[0] - 1) * ceil_div(n, block_n)
    grid = (max(1, min(work, grouped_gemm.target_of(a8).processors)),)
    for part in parts(w, E4M3, b2, lora, p):
        w8, bias, low, q, _ = part
        w8 = w8 if n == w8.shape[1] else w8[:, columns]
        kernel, weights, y_boxes = _gemm(
            w8.shape, w8.stride(), block_n, stages, block_scales, lora.rank
        )
        args = (source, (w8, weights), *low_rank(low, "nk", block_n, _BLOCK_R))
        args += (a_scale, rows, part.of(w.w_scale), bias, row_scores, (y, y_boxes), q.tiles)
        launch(kernel, grid, *args)
        del part, w8, args
    if not p.is_gathered:
        zero_tail(y, p)
    return y


def down_and_combine(a8, a_scale, w, b2, scores, lora, p: Permutation, tokens, slices):
    """Also dX. Sorted rows are not combined, and come in one piece."""
    if not p.is_gathered or slices == 1:
        y = down(a8, a_scale, w, b2, None, lora, p)
        return combine(y, scores, p.slot_row, p.token_start, tokens) if p.is_gathered else y
    hidden, depth = w.shape[1:]
    block_n = _tile_width(hidden, depth, a_scale.shape[0] > 1)
    out = memory.empty((tokens, hidden), torch.bfloat16, a8.device)
    w = decoded_once(w, E4M3)
    for columns, bias, factor in column_slices(hidden, slices, b2, lora):
        y = down(a8, a_scale, w, bias, None, factor, p, block_n, columns=columns)
        combine(y, scores, p.slot_row, p.token_start, tokens, out[:, columns])
        del y  # before the next one is allocated
    return out


def dz(
    dout, kept: Kept, w2: Weight, b2, scores, lora, lora_norm, p: Permutation, activation, gate_up,
    needs,
):  # fmt: skip
    if lora_norm is not None:
        w2 = w2._replace(w_norm=w2.w_norm + lora_norm)
    do8, do_scale, do_norm = quantize_rows(dout, True)
    act, columns = (activation, gate_up), needs.dz_t or needs.a
    scales = dz_scales(scores, do_scale, do_norm, kept, w2, p, *act, columns)
    dz8, dz_t, a_t, dscores = dz_gemm(
        do8, scales, kept.z, kept.z_scale, w2.mT, (dout, b2), scores, lora, p, *act, needs
    )
    dz_scale = scales.dz_scale if needs.dz else None
    dz = Dz(dz8, dz_scale, dz_t, scales.dz_t_scale if needs.dz_t else None)
    return dz, (do8, a_t, scales.a_t_scale) if needs.a else None, dscores


def dx(dz8, dz_scale, w1: Weight, lora, p: Permutation, tokens, slices):
    given = (None, None, lora, p, tokens, slices)
    return down_and_combine(dz8, dz_scale[None], w1.mT, *given)


def weight_gradient(left, right, w, p: Permutation, gathered, fp32):
    """Σ over an expert's rows of leftᵀ right, with the strides of w.

    `gathered` names the operand with rows of tokens, quantized here if they are in bf16; the other
    is transposed (N, P), with its scales (E, N).
    """
    dw = memory.empty_like(w, torch.float32 if fp32 else w.dtype)
    _write_weight_gradient(left, right, dw, p, gathered, add=False)
    return dw


def weight_gradient_into(main_grad, left, right, p: Permutation, gathered):
    _write_weight_gradient(left, right, main_grad, p, gathered, add=True)


def _write_weight_gradient(left, right, dw, p, gathered, add) -> None:
    rows, other, dw = (left, right, dw) if gathered == "left" else (right, left, dw.mT)
    rows8 = rows if rows.dtype == E4M3 else quantize_rows(rows, False)[0]
    other_t, scale = other
    fp8_wgrad.weight_gradient(rows8, other_t, scale, dw, p, add)
