"""Launches of the FP8 quantizers.

Functions without an underscore have the names, parameters and results of those in `reference.fp8`
and `reference.quantize`, `dequantize_rows` excepted.
"""

import math
from functools import cache

import torch

from ..enums import ActivationType
from ..kernels import bf16_operands
from ..kernels import quantize as kernels
from ..kernels.activation import value_of
from ..shapes import BLOCK, ceil_div
from ..tensors import E4M3, Permutation
from . import memory
from .descriptors import weight_layout
from .launcher import Bound, launch, power_of_two

_STEPS, _BLOCK = 4, 4096  # of a program of `weight_amax_kernel`, and weights per step
_TILE = 128  # rows and columns of a tile of `quantize_weight_kernel`
_GROUP, _GROUPS = 16, 1024  # adjacent weights, and groups of them in a sample of an expert at most


@cache
def _rows_kernel(hidden: int) -> tuple[int, Bound]:
    """Rows per program, and the kernel: 32 values per thread, in at least four warps."""
    columns = power_of_two(hidden)
    rows = max(1, 4096 // columns)
    warps = min(rows * columns // 1024, 32)
    kernel = kernels.quantize_rows_kernel
    return rows, Bound(kernel, H=hidden, BLOCK_T=rows, BLOCK_H=columns, num_warps=warps)


def quantize_rows(x, norms):
    """Rows may have any stride; their values are adjacent."""
    tokens, hidden = x.shape
    q = memory.empty((tokens, hidden), E4M3, x.device)
    scale = memory.empty((tokens,), torch.float32, x.device)
    norm = memory.empty((tokens,), torch.float32, x.device) if norms else None
    if tokens:
        rows, kernel = _rows_kernel(hidden)
        launch(kernel, (ceil_div(tokens, rows),), x, q, scale, norm, tokens, x.stride(0))
    return q, scale, norm


@cache
def _weight_kernels(n: int, k: int, sum_over: str | None) -> tuple[Bound, Bound, int]:
    """The kernels amax and quantize, and the tiles of an expert."""
    amax, quantize = kernels.weight_amax_kernel, kernels.quantize_weight_kernel
    sizes = {"N": n, "K": k, "BLOCK_N": _TILE, "BLOCK_K": _TILE}
    return (
        Bound(amax, SIZE=n * k, STEPS=_STEPS, BLOCK=_BLOCK, num_warps=8),
        Bound(quantize, **sizes, SUM=sum_over, num_warps=8),
        ceil_div(n, _TILE) * ceil_div(k, _TILE),
    )


@cache
def _norms_kernel(columns: int, count: int) -> Bound:
    options = {"TILES": ceil_div(count, _TILE), "COUNT": count, "BLOCK": 128}
    return Bound(kernels.column_norms_kernel, C=columns, **options, num_warps=4)


def quantize_weight_into(w8, w8_t, w_scale, w_norm, w):
    quantize_weight(w, w8_t is not None, w_norm is not None, (w8, w8_t, w_scale, w_norm))


def quantize_weight(w, transposed, norms, into=None):
    """w is dense, as (E, N, K) or as (E, K, N); N and K are multiples of 4."""
    experts, summed, columns = w.shape
    if into is None:
        into = (
            memory.empty((experts, summed, columns), E4M3, w.device),
            memory.empty((experts, columns, summed), E4M3, w.device) if transposed else None,
            memory.empty((experts,), torch.float32, w.device),
            memory.empty((experts, columns), torch.float32, w.device) if norms else None,
        )
    w8, w8_t, w_scale, w_norm = into
    in_order = weight_layout(w) == "nk"
    w, q, q_t = (w, w8, w8_t) if in_order else (w.mT, w8_t, w8)
    _, n, k = w.shape
    bits = memory.empty((experts,), torch.int32, w.device).zero_()
    squares = sum_over = None
    if norms:
        sum_over = "n" if in_order else "k"
        shape = (experts, ceil_div(summed, _TILE), columns)
        squares = memory.empty(shape, torch.float32, w.device)
    amax, quantize, tiles = _weight_kernels(n, k, sum_over)
    launch(amax, (ceil_div(n * k, _STEPS * _BLOCK), experts), w, bits)
    words = None if q_t is None else q_t.view(torch.int32)
    launch(quantize, (tiles, experts), w, bits, q, words, w_scale, squares)
    if norms:
        kernel = _norms_kernel(columns, summed)
        launch(kernel, (ceil_div(columns, 128), experts), squares, w_scale, w_norm)
    return into


def quantize_again(w, w_scale):
    """w8 of a weight whose scales are known: one pass over w. See `quantize_weight`."""
    q = memory.empty(w.shape, E4M3, w.device)
    in_order = weight_layout(w) == "nk"
    w = w if in_order else w.mT
    _, n, k = w.shape
    _, quantize, tiles = _weight_kernels(n, k, None)
    # In the order of w's memory, or transposed, as words.
    buffers = (q, None) if in_order else (None, q.view(torch.int32))
    launch(quantize, (tiles, w.shape[0]), w, None, *buffers, w_scale, None)
    return q


def dequantize_rows(q, scale):
    """(R, N) in bf16."""
    rows, n = q.shape
    out = memory.empty((rows, n), torch.bfloat16, q.device)
    if rows:
        blocks = scale.dim() == 2
        m, width = (32, BLOCK) if blocks else (8, 512)
        grid, options = (ceil_div(rows, m), ceil_div(n, width)), {"BLOCK_SCALES": blocks}
        options |= {"N": n, "BLOCK_M": m, "BLOCK_N": width, "num_warps": 4}
        launch(bf16_operands.dequantize_rows_kernel, grid, q, scale, out, rows, **options)
    return out


def scored_activation(z, zmax, scores, p: Permutation, activation: ActivationType, gate_up):
    """A' = score · act(Z) in bf16 (R, I); rows of no expert are not written."""
    rows, inner = z.shape[0], activation.intermediate_size(z.shape[1])
    a = memory.empty((rows, inner), torch.bfloat16, z.device)
    if rows:
        options = {"GATE_UP": gate_up if activation.is_gated else None}
        options |= {"ACTIVATION": value_of(activation, a.dtype), "BLOCK_M": p.tile_m}
        options |= {"ROWS": 16, "BLOCK_I": 128, "num_warps": 4}
        grid = (p.tiles.shape[0] - 1, p.tile_m // 16, ceil_div(inner, 128))
        args = (z, zmax if z.dtype == E4M3 else None, scores, p.row_slot, a, p.tiles, rows)
        launch(bf16_operands.scored_activation_kernel, grid, *args, I=inner, **options)
    return a


def samples_of(rows: int, columns: int) -> int:
    """How many samples cover the weights of an expert.

    One takes every `samples_of`-th group. That number has no factor in common with the groups of a
    row, so that each sample has values of every column.
    """
    samples = ceil_div(rows * columns, _GROUP * _GROUPS)
    while math.gcd(samples, columns // _GROUP) > 1:
        samples += 1
    return samples


@cache
def _check_kernel(shape1, shape2) -> Bound:
    (_, *size1), (_, *size2) = shape1, shape2
    first = {"SIZE1": math.prod(size1) // 4, "SAMPLES1": samples_of(*size1)}
    second = {"SIZE2": math.prod(size2) // 4, "SAMPLES2": samples_of(*size2)}
    return Bound(kernels.checked_scales_kernel, **first, **second, BLOCK=512, num_warps=8)


def checked_scales(weight1, q1, scale1, weight2, q2, scale2, sample, generation, flags):
    """A sample is at most 16384 values of an expert, in groups of 16, spread evenly."""
    experts, device = weight1.shape[0], weight1.device
    new1 = memory.empty((experts,), torch.float32, device)
    new2 = memory.empty((experts,), torch.float32, device)
    kernel = _check_kernel(weight1.shape, weight2.shape)
    first, second = (weight1, q1, scale1, new1), (weight2, q2, scale2, new2)
    launch(kernel, (experts, 2), *first, *second, sample, generation, flags)
    return new1, new2
