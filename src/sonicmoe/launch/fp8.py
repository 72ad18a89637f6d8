"""Launches of the experts in FP8 on Hopper.

Functions without an underscore have the names, parameters and results of the operators in
`ops.fp8`.
"""

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl

from ..enums import ActivationType
from ..fp8_tensors import E4M3, Z_DTYPE, Fp8Weight
from ..kernels.activation import value_of
from ..kernels.hopper.fp8_gemm import fp8_gemm_kernel
from ..kernels.hopper.fp8_up import SLICE, fp8_up_kernel
from ..memory_policy import FP8_COLUMNS as BLOCK
from ..memory_policy import slice_width
from ..permutation import Permutation
from ..shapes import ceil_div
from . import grouped_gemm, memory
from .descriptors import Boxes
from .fp8_dz import dz_gemm
from .fp8_scales import dz_scales
from .fp8_wgrad import weight_gradient
from .grouped_gemm import _zero_tail, combine
from .grouped_gemm_hopper import _row_boxes, _z_boxes, row_boxes
from .launcher import Bound, launch
from .quantize import (
    checked_scales,
    dequantize_rows,
    quantize_rows,
    quantize_weight,
    scored_activation,
)

__all__ = ["checked_scales", "quantize_rows", "quantize_weight"]  # operators too

_CONSUMER_M = 64


@lru_cache(maxsize=1024)
def _weight_boxes(shape, strides, block_n) -> Boxes:
    """Boxes of e4m3 weights (E, N, K), which may be a slice of N."""
    block = [1, block_n, BLOCK]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    return Boxes(E4M3, shape, strides, block, layout)


@lru_cache(maxsize=1024)
def _gate_up_boxes(shape, gate_up) -> Boxes:
    """Boxes of 128 gates and their ups, of contiguous e4m3 weights (E, 2I, H)."""
    experts, columns, hidden = shape
    inner = columns // 2
    half, one = (inner * hidden, hidden) if gate_up == "concatenated" else (hidden, 2 * hidden)
    block = [1, 2, BLOCK, BLOCK]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    shape = (experts, 2, inner, hidden)
    return Boxes(E4M3, shape, (columns * hidden, half, one, 1), block, layout)


@lru_cache(maxsize=1024)
def _up(shape, strides, activation: ActivationType, gate_up, keep_z):
    """The kernel; boxes of W1, Z and A; columns of Z in a tile."""
    _, columns, hidden = shape
    inner = activation.intermediate_size(columns)
    options = {"GATE_UP": gate_up, "ACTIVATION": value_of(activation)}
    options |= {"KEEP_Z": keep_z in Z_DTYPE}
    kernel = Bound(fp8_up_kernel, H=hidden, N=columns, STAGES=4, **options, num_warps=4)
    gated = activation.is_gated
    weights = _gate_up_boxes(shape, gate_up) if gated else _weight_boxes(shape, strides, BLOCK)
    width = 2 * SLICE.value if gate_up == "interleaved" else SLICE.value
    z = _z_boxes(Z_DTYPE.get(keep_z, torch.bfloat16), columns, width, gate_up)
    a = _row_boxes(E4M3, (inner,), (inner, 1), (_CONSUMER_M, BLOCK))
    return kernel, weights, z, a, BLOCK * (1 + gated)


def fp8_up(x8, x_scale, w, p: Permutation, activation: ActivationType, gate_up, keep_z):
    w8, w_scale = w.w8, w.w_scale
    rows, device = p.rows_of(x8), x8.device
    inner = activation.intermediate_size(w8.shape[1])
    blocks = ceil_div(inner, BLOCK)
    z = zmax = zmax_columns = column_bits = None
    if keep_z in Z_DTYPE:
        z = memory.empty((rows, w8.shape[1]), Z_DTYPE[keep_z], device)
        zmax = memory.empty((blocks, rows), torch.float32, device)
        column_bits = memory.empty((w8.shape[0], inner), torch.int32, device).zero_()
        zmax_columns = column_bits.view(torch.float32)
    a = memory.empty((rows, inner), E4M3, device)
    a_scale = memory.empty((blocks, rows), torch.float32, device)
    if rows == 0:
        return z, zmax, zmax_columns, a, a_scale
    gate_up = gate_up if activation.is_gated else None
    kernel, weights, z_boxes, a_boxes, width = _up(
        w8.shape, w8.stride(), activation, gate_up, keep_z
    )
    source = x8 if p.is_gathered else row_boxes(x8, _CONSUMER_M, BLOCK)
    # If Z is not stored, any address of the right dtype will do.
    z_target = memory.empty((8, 8), torch.bfloat16, device) if z is None else z
    args = (source, p.row_token, (w8, weights), x_scale, w_scale, (z_target, z_boxes))
    work = (p.tiles.shape[0] - 1) * ceil_div(w8.shape[1], width)
    grid = (max(1, min(work, grouped_gemm.target_of(x8).processors)),)
    launch(kernel, grid, *args, zmax, column_bits, (a, a_boxes), a_scale, rows, p.tiles)
    return z, zmax, zmax_columns, a, a_scale


def fp8_recomputed(dout, x, w1, w, p: Permutation, activation, gate_up):
    x8, x_scale, _ = quantize_rows(x, False)
    w = w if w.w8 is not None else Fp8Weight(*quantize_weight(w1, False, False))
    *of_z, _, a_scale = fp8_up(x8, x_scale, w, p, activation, gate_up, "keep")
    return *of_z, a_scale, x_scale


@lru_cache(maxsize=1024)
def _gemm(shape, strides, block_n, stages, block_scales):
    """The kernel; boxes of W and Y."""
    _, columns, depth = shape
    sizes = {"K": depth, "N": columns, "BLOCK_N": block_n, "STAGES": stages}
    kernel = Bound(fp8_gemm_kernel, **sizes, BLOCK_SCALES=block_scales, num_warps=4)
    y = _row_boxes(torch.bfloat16, (columns,), (columns, 1), (_CONSUMER_M, block_n))
    return kernel, _weight_boxes(shape, strides, block_n), y


def _tile_width(columns, depth, block_scales) -> int:
    # Narrow tiles for dX with K = 512: at 24576,1536,256,128,8 it takes 0.360 ms instead of 0.395.
    return 128 if columns <= 128 or (not block_scales and 256 < depth <= 512) else 256


def fp8_gemm(a8, a_scale, w, row_scores, p: Permutation, block_n=None, stages=None):
    """`block_n` and `stages` are there to be measured. W may be a slice of N."""
    w8, w_scale = w.w8, w.w_scale
    rows, columns = a8.shape[0], w8.shape[1]
    y = memory.empty((rows, columns), torch.bfloat16, a8.device)
    if rows == 0:
        return y
    block_scales = a_scale.shape[0] > 1
    block_n = block_n or _tile_width(columns, a8.shape[1], block_scales)
    stages = stages or (6 if block_n == 128 else 3)
    kernel, weights, y_boxes = _gemm(w8.shape, w8.stride(), block_n, stages, block_scales)
    source = row_boxes(a8, _CONSUMER_M, BLOCK)
    args = (source, (w8, weights), a_scale, rows, w_scale, row_scores, (y, y_boxes), p.tiles)
    work = (p.tiles.shape[0] - 1) * ceil_div(columns, block_n)
    launch(kernel, (max(1, min(work, grouped_gemm.target_of(a8).processors)),), *args)
    if not p.is_gathered:
        _zero_tail(y, p)
    return y


def fp8_down_and_combine(a8, a_scale, w, scores, p: Permutation, tokens, slices):
    """Also dX. Sorted rows are not combined, and come in one piece."""
    if not p.is_gathered or slices == 1:
        y = fp8_gemm(a8, a_scale, w, None, p)
        return combine(y, scores, p.slot_row, p.token_start, tokens) if p.is_gathered else y
    hidden, depth = w.w8.shape[1:]
    block_n = _tile_width(hidden, depth, a_scale.shape[0] > 1)
    out = memory.empty((tokens, hidden), torch.bfloat16, a8.device)
    width = slice_width(hidden, slices)
    for first in range(0, hidden, width):
        columns = slice(first, first + width)
        part = w._replace(w8=w.w8[:, columns])
        y = fp8_gemm(a8, a_scale, part, None, p, block_n)
        combine(y, scores, p.slot_row, p.token_start, tokens, out[:, columns])
        del y  # before the next one is allocated
    return out


def fp8_down_backward(
    dout, kept, w2, w, scores, p: Permutation, activation, gate_up, needs, fp32_dw, bf16_dw
):
    dw2 = memory.empty_like(w2, torch.float32 if fp32_dw else w2.dtype) if needs.dw2 else None
    w, act = _with_transpose(w, w2, norms=True), (activation, gate_up)
    of_dz, dscores = _down_backward(dout, kept, w, scores, p, act, needs, dw2, bf16_dw)
    return *of_dz, dw2, dscores


def fp8_down_backward_into(
    main_grad, dout, kept, w2, w, scores, p: Permutation, activation, gate_up, needs, bf16_dw
):
    w, act = _with_transpose(w, w2, norms=True), (activation, gate_up)
    of_dz, dscores = _down_backward(
        dout, kept, w, scores, p, act, needs, main_grad, bf16_dw, add=True
    )
    return *of_dz, dscores


def _down_backward(dout, kept, w, scores, p, act, needs, dw2, bf16_dw, add=False):
    """The fields of `Fp8Dz`, None where not needed; dscores. dW2 goes to `dw2`."""
    z, zmax = kept.z, kept.zmax
    needs = needs._replace(dw2=dw2 is not None and not bf16_dw)
    do8, do_scale, do_norm = quantize_rows(dout, True)
    columns = needs.dz_t or needs.dw2
    scales = dz_scales(scores, do_scale, do_norm, kept, w, p, *act, columns)
    dz8, dz_t, a_t, dscores = dz_gemm(do8, scales, z, zmax, w.w8_t, scores, p, *act, needs)
    if needs.dw2:
        weight_gradient(do8, a_t, scales.a_t_scale, dw2, p, add)
    elif dw2 is not None:
        a = scored_activation(z, zmax, scores, p, *act)
        grouped_gemm.weight_gradient(dout, a, dw2, p, "left", add)
    dz_scale = scales.dz_scale if needs.dz else None
    return (dz8, dz_scale, dz_t, scales.dz_t_scale if needs.dz_t else None), dscores


def _with_transpose(w: Fp8Weight, parameter, norms=False) -> Fp8Weight:
    """A weight that has its transpose, if need be from the parameter, and then nothing else."""
    if w.w8_t is not None:
        return w
    return Fp8Weight(*quantize_weight(parameter, True, norms))._replace(w8=None)


def fp8_up_backward(dz, x, w1, w, p: Permutation, needs, fp32_dw, bf16_dw, slices):
    dx = dw1 = None
    if needs.dx:
        w_t, tokens = _with_transpose(w, w1).mT, x.shape[0]
        dx = fp8_down_and_combine(dz.dz8, dz.dz_scale[None], w_t, None, p, tokens, slices)
        del w_t  # before dW1 is allocated
    if needs.dw1:
        dw1 = memory.empty_like(w1, torch.float32 if fp32_dw else w1.dtype)
        _dw1(dz, x, dw1, p, bf16_dw)
    return dx, dw1


def fp8_up_backward_into(main_grad, dz, x, w1, w, p: Permutation, needs, bf16_dw, slices):
    _dw1(dz, x, main_grad, p, bf16_dw, add=True)
    if not needs.dx:
        return None
    w_t, tokens = _with_transpose(w, w1).mT, x.shape[0]
    return fp8_down_and_combine(dz.dz8, dz.dz_scale[None], w_t, None, p, tokens, slices)


def _dw1(dz, x, dw1, p: Permutation, bf16_dw, add=False) -> None:
    if bf16_dw:
        rows = dequantize_rows(dz.dz8, dz.dz_scale)
        grouped_gemm.weight_gradient(rows, x, dw1, p, "right", add)
    else:
        weight_gradient(quantize_rows(x, False)[0], dz.dz_t, dz.dz_t_scale, dw1.mT, p, add)
