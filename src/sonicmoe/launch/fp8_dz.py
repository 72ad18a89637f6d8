"""Launch of the dZ GEMM in FP8."""

from functools import lru_cache
from typing import NamedTuple

import torch

from ..kernels.activation import derivative_of
from ..kernels.hopper.dz import SLICE
from ..kernels.hopper.fp8_dz import hopper_fp8_dz_kernel
from ..shapes import ceil_div, padded_rows
from ..tensors import E4M3, DzResults, Permutation, Weight
from . import grouped_gemm, memory
from .boxes import ORIGIN, UNBOUNDED, laid_out, low_rank, ragged_boxes, z_boxes
from .launcher import Bound, launch
from .weights import parts

_ROWS, _WIDTH = 64, SLICE.value  # of a slice


class Ring(NamedTuple):
    """Blocks of the main loop: 144 KB in all, next to 64 KB of Z and 8 KB of A'ᵀ."""

    block_n: int = 256
    block_k: int = 64  # with 128 the producer spills a register
    stages: int = 6


_RING = Ring()


@lru_cache(maxsize=1024)
def _kernel(shape, z_dtype, activation, gate_up, needs: DzResults, gather, rank, ring: Ring):
    """The kernel; boxes of sorted rows of dO, of W2, Z and dZ."""
    _, inner, hidden = shape
    n, k, stages = ring
    options = {"GATE_UP": gate_up, "BACKWARD": derivative_of(activation, E4M3), "GATHER": gather}
    options |= {"STORE_DZ": needs.dz, "STORE_T": needs.dz_t, "STORE_A": needs.a}
    options |= {"STORE_PARTIAL": needs.dscores}
    sizes = {"H": hidden, "I": inner, "RANK": rank, "BLOCK_N": n, "BLOCK_K": k, "STAGES": stages}
    kernel = Bound(hopper_fp8_dz_kernel, **sizes, **options, num_warps=4)
    rows = ragged_boxes(E4M3, (hidden,), (hidden, 1), (_ROWS, k))
    weights = laid_out(E4M3, shape, (inner * hidden, hidden, 1), (1, n, k))
    columns = 2 * inner if activation.is_gated else inner
    width = 2 * _WIDTH if gate_up == "interleaved" else _WIDTH
    z = z_boxes(z_dtype, columns, width, gate_up)
    if gate_up == "concatenated":
        size = (UNBOUNDED, UNBOUNDED, 2, ORIGIN, inner)  # gates and ups of a row: `ragged_boxes`
        strides = (2**34 - columns, columns, inner, columns, 1)
        dz = laid_out(E4M3, size, strides, (1, 1, 2, _ROWS, _WIDTH))
    else:
        dz = ragged_boxes(E4M3, (columns,), (columns, 1), (_ROWS, width))
    return kernel, rows, weights, z, dz


@lru_cache(maxsize=1024)
def _transposed_boxes(inner, padded, gate_up):
    """Boxes of dZᵀ (N, P), of gates and ups at once, and of A'ᵀ (I, P)."""
    parts = 1 if gate_up is None else 2
    strides = (inner * padded, padded) if gate_up == "concatenated" else (padded, parts * padded)
    dz_t = laid_out(E4M3, (parts, inner, padded), (*strides, 1), (parts, _WIDTH, _ROWS))
    return dz_t, laid_out(E4M3, (inner, padded), (padded, 1), (_WIDTH, _ROWS))


def dz_gemm(
    do8, scales, z, zmax, w2_t: Weight, bias, scores, lora, p: Permutation, activation, gate_up,
    needs, ring=_RING,
):  # fmt: skip
    """As `reference.fp8.dz_gemm`, but columns of dZᵀ and A'ᵀ of no tile are not written.

    `ring` is there to be measured.
    """
    if not any(needs):
        return None, None, None, None
    rows, device = z.shape[0], z.device
    experts, inner, _ = w2_t.shape
    padded = padded_rows(rows, experts)
    dz = memory.empty(z.shape, E4M3, device) if needs.dz else None
    dz_t = memory.empty((z.shape[1], padded), E4M3, device) if needs.dz_t else None
    a_t = memory.empty((inner, padded), E4M3, device) if needs.a else None
    dscores = memory.empty(scores.shape, torch.float32, device) if needs.dscores else None
    if rows == 0:
        return dz, dz_t, a_t, dscores
    tiles_n, (dout, b2) = ceil_div(inner, ring.block_n), bias
    partial = grouped_gemm.partial_scores(tiles_n, b2, dscores, device)
    gate_up = gate_up if activation.is_gated else None
    dz_t_boxes, a_t_boxes = _transposed_boxes(inner, padded, gate_up)
    programs = grouped_gemm.target_of(z).processors
    grid = (max(1, min((p.tiles.shape[0] - 1) * tiles_n, programs)),)
    zmax = zmax if z.dtype == E4M3 else None
    factors = (
        scales.row_factors,
        scales.column_factors if needs.dz_t else None,
        scales.block_factors if needs.a else None,
    )
    # The columns of dZᵀ and A'ᵀ depend on the number of the expert.
    for part in parts(w2_t, E4M3, None, lora, p, at_once=needs.dz_t or needs.a):
        w8, _, low, q, _ = part
        kernel, row_boxes, weights, z_boxes, dz_boxes = _kernel(
            w8.shape, z.dtype, activation, gate_up, needs, p.is_gathered, lora.rank, ring
        )
        # In bf16 half as many columns have the bytes of a block.
        adapter = low_rank(low, "nk", ring.block_n, ring.block_k // 2)
        rows_of_do = do8 if p.is_gathered else (do8, row_boxes)
        sources = (rows_of_do, p.row_token, (w8, weights), *adapter)
        outputs = ((dz, dz_boxes), (dz_t, dz_t_boxes), (a_t, a_t_boxes))
        # What is not stored needs an address all the same.
        targets = [(do8 if t is None else t, boxes) for t, boxes in outputs]
        args = (*sources, *factors, rows, p.row_slot, (z, z_boxes), zmax, *targets)
        launch(kernel, grid, *args, partial, partial.shape[1], q.tiles)
        del part, w8, sources, args
    grouped_gemm.sum_partial_scores(partial, dout, b2, p, dscores)
    return dz, dz_t, a_t, dscores
