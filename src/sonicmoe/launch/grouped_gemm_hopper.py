"""Launches of the Hopper kernels: one program per SM, operands as TMA descriptors."""

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl

from ..kernels.activation import derivative_of, value_of
from ..kernels.hopper.dz import SLICE, hopper_dz_kernel
from ..kernels.hopper.gemm import hopper_gemm_kernel
from ..kernels.hopper.up import hopper_up_kernel
from ..kernels.hopper.wgrad import hopper_wgrad_kernel
from ..tuning import RowConfig, WeightConfig
from .descriptors import Boxes
from .grouped_gemm import NO_ADAPTER, Adapter, gate_up_of
from .launcher import Bound, launch

_ROWS = 64  # rows of one consumer warpgroup
_WIDTH = SLICE.value
_GL_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_ENDLESS = 0x7FFF0000
_ORIGIN = 1 << 30


def _laid_out(dtype: torch.dtype, shape, strides, block) -> Boxes:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _GL_DTYPE[dtype])
    return Boxes(dtype, shape, strides, block, layout)


@lru_cache(maxsize=1024)
def _row_boxes(dtype, columns, strides, block) -> Boxes:
    shape = (_ENDLESS, _ENDLESS, _ORIGIN, *columns)
    return _laid_out(dtype, shape, (2**34 - strides[0], strides[0], *strides), (1, 1, *block))


def _weight_boxes(dtype, shape, strides, n, k, two_halves=False) -> Boxes:
    """Boxes of (E, N, K) weights, which may lie in memory as (E, K, N)."""
    experts, columns, depth = shape
    per_expert, per_column, per_element = strides
    transposed = per_element != 1
    if not two_halves:
        if transposed:
            return _laid_out(
                dtype, (experts, depth, columns), (per_expert, per_element, 1), (1, k, n)
            )
        return _laid_out(dtype, shape, strides, (1, n, k))
    half = columns // 2
    if transposed:
        return _laid_out(
            dtype, (experts, depth, 2, half), (per_expert, per_element, half, 1), (1, k, 1, n // 2)
        )
    return _laid_out(
        dtype, (experts, 2, half, depth), (per_expert, half * per_column, per_column, 1),
        (1, 2, n // 2, k),
    )  # fmt: skip


def _layout(k_stride: int) -> str:
    """WEIGHT_LAYOUT of weights whose elements along K are `k_stride` apart."""
    return "nk" if k_stride == 1 else "kn"


def _z_boxes(dtype, columns, width, two_halves) -> Boxes:
    """Boxes of Z and dZ with `width` columns, of one half if gate and up are concatenated."""
    if two_halves:
        half = columns // 2
        return _row_boxes(dtype, (2, half), (columns, half, 1), (_ROWS, 1, width))
    return _row_boxes(dtype, (columns,), (columns, 1), (_ROWS, width))


def row_boxes(t: torch.Tensor, *block: int) -> tuple[torch.Tensor, Boxes]:
    """Boxes of rows that end with their expert: see `kernels.hopper.ragged`."""
    return t, _row_boxes(t.dtype, t.shape[1:], t.stride(), block)


# --- cached by weights and configuration ----------------------------------------------------------
@lru_cache(maxsize=1024)
def _factor_boxes(*args) -> Boxes:
    return _weight_boxes(*args)


@lru_cache(maxsize=1024)
def _up(dtype, shape, strides, n, k, stages, activation, concatenated, keep_z, gather, rank):
    """The kernel; boxes of W1, Z and A."""
    _, columns, hidden = shape
    gated = activation.is_gated
    two_halves = gated and concatenated
    inner = columns // 2 if gated else columns
    kernel = Bound(
        hopper_up_kernel,
        H=hidden, N=columns, RANK=rank, BLOCK_N=n, BLOCK_K=k, STAGES=stages,
        WEIGHT_LAYOUT=_layout(strides[2]), GATE_UP=gate_up_of(activation, concatenated),
        ACTIVATION=value_of(activation),        KEEP_Z=keep_z, GATHER=gather, num_warps=4,
    )  # fmt: skip
    weights = _weight_boxes(dtype, shape, strides, n, k, two_halves)
    z = _z_boxes(dtype, columns, n // 4, two_halves)
    return kernel, weights, z, _row_boxes(dtype, (inner,), (inner, 1), (_ROWS, n // 4))


@lru_cache(maxsize=1024)
def _product(dtype, shape, strides, n, k, stages, rank):
    """The kernel; boxes of W and Y."""
    _, columns, depth = shape
    kernel = Bound(
        hopper_gemm_kernel,
        K=depth, N=columns, RANK=rank, BLOCK_N=n, BLOCK_K=k, STAGES=stages,
        WEIGHT_LAYOUT=_layout(strides[2]), num_warps=4,
    )  # fmt: skip
    weights = _weight_boxes(dtype, shape, strides, n, k)
    return kernel, weights, _row_boxes(dtype, (columns,), (columns, 1), (_ROWS, n))


@lru_cache(maxsize=1024)
def _score_gradient(
    dtype, shape, strides, n, k, stages, activation, concatenated, store_a, store_partial, gather,
    rank,
):  # fmt: skip
    """The kernel; boxes of W2 as (E, I, H) weights, of Z and dZ, and of A'."""
    experts, hidden, inner = shape
    gated = activation.is_gated
    two_halves = gated and concatenated
    kernel = Bound(
        hopper_dz_kernel,
        H=hidden, I=inner, RANK=rank, BLOCK_N=n, BLOCK_K=k, STAGES=stages,
        WEIGHT_LAYOUT=_layout(strides[1]), GATE_UP=gate_up_of(activation, concatenated),
        BACKWARD=derivative_of(activation),
        STORE_A=store_a, STORE_PARTIAL=store_partial, GATHER=gather, num_warps=4,
    )  # fmt: skip
    weights = _weight_boxes(
        dtype, (experts, inner, hidden), (strides[0], strides[2], strides[1]), n, k
    )
    columns = 2 * inner if gated else inner
    width = 2 * _WIDTH if gated and not concatenated else _WIDTH
    z = _z_boxes(dtype, columns, width, two_halves)
    return kernel, weights, z, _row_boxes(dtype, (inner,), (inner, 1), (_ROWS, _WIDTH))


@lru_cache(maxsize=1024)
def _weight_gradient(dtype, shape, strides, m, n, k, stages, gather_left, gather_right, add):
    """The kernel; boxes of the gradient, None for fp32, which is stored without TMA."""
    kernel = Bound(
        hopper_wgrad_kernel,
        M=shape[1], N=shape[2], BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, STAGES=stages,
        GATHER_LEFT=gather_left, GATHER_RIGHT=gather_right, ADD=add, num_warps=4,
    )  # fmt: skip
    if dtype == torch.float32:
        return kernel, None
    return kernel, _laid_out(dtype, shape, strides, (1, m // 2, n // 4))


# --- launches -------------------------------------------------------------------------------------
def _adapter(adapter: Adapter, transposed: bool, n: int, k: int, two_halves: bool = False) -> tuple:
    """U and B as the kernels take them: B in the layout and in boxes of the weights."""
    u, b = adapter
    if u is None or b is None:
        return adapter
    b = b.mT.contiguous().mT if transposed else b.contiguous()
    boxes = _factor_boxes(b.dtype, b.shape, b.stride(), n, k, two_halves)
    return row_boxes(u, _ROWS, k), (b, boxes)


def up(
    x, w1, b1, row_token, z, a, tiles, activation, concatenated, keep_z, config, programs,
    adapter=NO_ADAPTER,
):  # fmt: skip
    gather = row_token is not None
    n, k = config.block_n, config.block_k
    kernel, weights, z_boxes, a_boxes = _up(
        x.dtype, w1.shape, w1.stride(), n, k, config.stages, activation, concatenated, keep_z,
        gather, adapter.rank,
    )  # fmt: skip
    launch(
        kernel, (programs,),
        x if gather else row_boxes(x, _ROWS, k), row_token, (w1, weights),
        *_adapter(adapter, w1.stride(2) != 1, n, k, activation.is_gated and concatenated), b1,
        (z if keep_z else a, z_boxes),  # not stored: any valid address will do
        (a, a_boxes), tiles,
    )  # fmt: skip


def product(
    a, w, bias, row_scores, y, tiles, config: RowConfig, programs: int, adapter=NO_ADAPTER
) -> None:
    n, k = config.block_n, config.block_k
    kernel, weights, y_boxes = _product(
        a.dtype, w.shape, w.stride(), n, k, config.stages, adapter.rank
    )
    launch(
        kernel, (programs,),
        row_boxes(a, _ROWS, k), (w, weights), *_adapter(adapter, w.stride(2) != 1, n, k),
        bias, row_scores, (y, y_boxes), tiles,
    )  # fmt: skip


def score_gradient(
    dout, row_token, w2, scores, row_slot, z, dz, a, partial, plane, tiles,
    activation, concatenated, store_a, store_partial, config, programs, adapter=NO_ADAPTER,
):  # fmt: skip
    gather = row_token is not None
    n, k = config.block_n, config.block_k
    kernel, weights, z_boxes, a_boxes = _score_gradient(
        z.dtype, w2.shape, w2.stride(), n, k, config.stages, activation, concatenated,
        store_a, store_partial, gather, adapter.rank,
    )  # fmt: skip
    launch(
        kernel, (programs,),
        dout if gather else row_boxes(dout, _ROWS, k), row_token, (w2, weights),
        *_adapter(adapter, w2.stride(1) != 1, n, k), scores, row_slot,
        (z, z_boxes), (dz, z_boxes), (a if store_a else dz, a_boxes), partial, plane, tiles,
    )  # fmt: skip


def weight_gradient(
    left, left_token, right, right_token, out, add: bool, expert_start, tiles, partial, span,
    places, config: WeightConfig, programs: int,
):  # fmt: skip
    m, n, k = config.block_m, config.block_n, config.block_k
    kernel, out_boxes = _weight_gradient(
        out.dtype, out.shape, out.stride(), m, n, k, config.stages,
        left_token is not None, right_token is not None, add,
    )  # fmt: skip
    in_fp32 = out_boxes is None
    launch(
        kernel, (programs,),
        row_boxes(left, k, m // 2) if left_token is None else left,
        row_boxes(right, k, n) if right_token is None else right,
        right_token if left_token is None else left_token,
        None if in_fp32 else (out, out_boxes), out if in_fp32 else None, partial,
        expert_start, tiles, out.shape[0], span, places,
    )  # fmt: skip
