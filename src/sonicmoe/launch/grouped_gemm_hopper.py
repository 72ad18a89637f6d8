"""Arguments of the Hopper kernels: one program per SM, operands as TMA descriptors.

Functions without an underscore return a kernel and its arguments, for `grouped_gemm` to launch.
"""

from functools import lru_cache

import torch

from ..enums import ActivationType
from ..kernels.activation import derivative_of, value_of
from ..kernels.hopper.dz import SLICE, hopper_dz_kernel
from ..kernels.hopper.gemm import hopper_gemm_kernel
from ..kernels.hopper.up import hopper_up_kernel
from ..kernels.hopper.wgrad import hopper_wgrad_kernel
from ..tensors import Lora, Permutation
from ..tuning import RowConfig, WeightConfig
from .boxes import laid_out, low_rank, ragged_boxes, row_boxes, weight_boxes, z_boxes
from .descriptors import weight_layout
from .launcher import Bound
from .spans import Spans

_ROWS = 64  # rows of one consumer warpgroup
_WIDTH = SLICE.value
Launch = tuple[Bound, tuple]


# --- kernels and boxes that depend on weights and configuration alone -----------------------------
def _ring(config: RowConfig) -> dict[str, int]:
    return {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.stages}


@lru_cache(maxsize=1024)
def _up(dtype, z_dtype, shape, strides, config, activation, gate_up, keep_z, gather, rank):
    """The kernel; boxes of W1, Z and A."""
    _, columns, hidden = shape
    inner = activation.intermediate_size(columns)
    n, k = config.block_n, config.block_k
    options = {"GATE_UP": gate_up, "ACTIVATION": value_of(activation, dtype), "KEEP_Z": keep_z}
    options |= {"WEIGHT_LAYOUT": "nk" if strides[2] == 1 else "kn", "GATHER": gather}
    sizes = {"H": hidden, "N": columns, "RANK": rank}
    kernel = Bound(hopper_up_kernel, **sizes, **_ring(config), **options, num_warps=4)
    weights = weight_boxes(dtype, shape, strides, n, k, gate_up)
    z = z_boxes(z_dtype, columns, n // 4, gate_up)
    return kernel, weights, z, ragged_boxes(dtype, (inner,), (inner, 1), (_ROWS, n // 4))


@lru_cache(maxsize=1024)
def _gemm(dtype, shape, strides, config, rank):
    """The kernel; boxes of W and Y."""
    _, columns, depth = shape
    n, k = config.block_n, config.block_k
    options = {"WEIGHT_LAYOUT": "nk" if strides[2] == 1 else "kn", **_ring(config)}
    sizes = {"K": depth, "N": columns, "RANK": rank}
    kernel = Bound(hopper_gemm_kernel, **sizes, **options, num_warps=4)
    weights = weight_boxes(dtype, shape, strides, n, k)
    return kernel, weights, ragged_boxes(dtype, (columns,), (columns, 1), (_ROWS, n))


@lru_cache(maxsize=1024)
def _dz_gemm(dtype, z_dtype, shape, strides, config, activation, gate_up, stores, gather, rank):
    """The kernel; boxes of W2 as (E, I, H) weights, of Z, dZ and A'."""
    experts, hidden, inner = shape
    options = {"GATE_UP": gate_up, "BACKWARD": derivative_of(activation, dtype), "GATHER": gather}
    options |= {"STORE_A": stores[0], "STORE_PARTIAL": stores[1]}
    options |= {"WEIGHT_LAYOUT": "nk" if strides[1] == 1 else "kn", **_ring(config)}
    sizes = {"H": hidden, "I": inner, "RANK": rank}
    kernel = Bound(hopper_dz_kernel, **sizes, **options, num_warps=4)
    transposed = (strides[0], strides[2], strides[1])
    weights = weight_boxes(
        dtype, (experts, inner, hidden), transposed, config.block_n, config.block_k
    )
    columns = 2 * inner if activation.is_gated else inner
    width = 2 * _WIDTH if gate_up == "interleaved" else _WIDTH
    z, dz = (z_boxes(d, columns, width, gate_up) for d in (z_dtype, dtype))
    return kernel, weights, z, dz, ragged_boxes(dtype, (inner,), (inner, 1), (_ROWS, _WIDTH))


@lru_cache(maxsize=1024)
def _weight_gradient(dtype, shape, strides, config, gather_left, gather_right, add):
    """The kernel; boxes of the gradient, None for fp32, which is stored without TMA."""
    m, n = config.block_m, config.block_n
    options = {"GATHER_LEFT": gather_left, "GATHER_RIGHT": gather_right, "ADD": add}
    sizes = {"M": shape[1], "N": shape[2], "BLOCK_M": m, **_ring(config)}
    kernel = Bound(hopper_wgrad_kernel, **sizes, **options, num_warps=4)
    if dtype == torch.float32:
        return kernel, None
    return kernel, laid_out(dtype, shape, strides, (1, m // 2, n // 4))


# --- kernels and their arguments ------------------------------------------------------------------
def up(
    x, w1, b1, p: Permutation, outputs, activation: ActivationType, gate_up, keep_z, config, lora
) -> Launch:
    """`outputs` are Z, its scales or None, and A."""
    z, z_scale, a = outputs
    kernel, weights, z_boxes, a_boxes = _up(
        x.dtype,
        z.dtype,
        w1.shape,
        w1.stride(),
        config,
        activation,
        gate_up,
        keep_z,
        p.is_gathered,
        lora.rank,
    )
    rows = x if p.is_gathered else row_boxes(x, _ROWS, config.block_k)
    adapter = low_rank(lora, weight_layout(w1), config.block_n, config.block_k, gate_up)
    stored = ((z, z_boxes), z_scale, (a, a_boxes))
    return kernel, (
        rows, p.row_token, (w1, weights), *adapter, b1, *stored, p.tiles, p.rows_of(x),
    )  # fmt: skip


def down(a, w, bias, row_scores, y, p: Permutation, config: RowConfig, lora: Lora) -> Launch:
    kernel, weights, y_boxes = _gemm(a.dtype, w.shape, w.stride(), config, lora.rank)
    rows = row_boxes(a, _ROWS, config.block_k)
    adapter = low_rank(lora, weight_layout(w), config.block_n, config.block_k)
    return kernel, (rows, (w, weights), *adapter, bias, row_scores, (y, y_boxes), p.tiles)


def dz_gemm(
    dout, z, z_scale, w2, scores, p: Permutation, outputs, activation, gate_up, store_partial,
    config, lora,
) -> Launch:  # fmt: skip
    """`outputs` are dZ, A' or None, and the partial sums of the score gradient."""
    dz, a, partial = outputs
    stores = (a is not None, store_partial)
    kernel, weights, z_boxes, dz_boxes, a_boxes = _dz_gemm(
        dout.dtype,
        z.dtype,
        w2.shape,
        w2.stride(),
        config,
        activation,
        gate_up,
        stores,
        p.is_gathered,
        lora.rank,
    )
    rows = dout if p.is_gathered else row_boxes(dout, _ROWS, config.block_k)
    layout = "nk" if w2.stride(1) == 1 else "kn"
    adapter = low_rank(lora, layout, config.block_n, config.block_k)
    stored = ((z, z_boxes), z_scale, (dz, dz_boxes), (dz if a is None else a, a_boxes))
    args = (rows, p.row_token, (w2, weights), *adapter, scores, p.row_slot, *stored)
    return kernel, (*args, partial, partial.shape[1], p.tiles, z.shape[0])


def weight_gradient(
    left,
    right,
    dw,
    add,
    p: Permutation,
    gather: tuple[bool, bool],
    spans: Spans,
    config: WeightConfig,
) -> Launch:
    """`gather` says which of the operands, left and right, is gathered."""
    kernel, boxes = _weight_gradient(dw.dtype, dw.shape, dw.stride(), config, *gather, add)
    m, n, k = config.block_m, config.block_n, config.block_k
    left = left if gather[0] else row_boxes(left, k, m // 2)
    right = right if gather[1] else row_boxes(right, k, n)
    operands = (left, right, p.row_token if any(gather) else None)
    outputs = (None, dw) if boxes is None else ((dw, boxes), None)
    split = (p.expert_start, p.tiles, dw.shape[0], spans.rows, spans.places)
    return kernel, (*operands, *outputs, spans.partial, *split)
