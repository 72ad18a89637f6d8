"""Launches of the Hopper kernels: one program a multiprocessor, everything through descriptors."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..kernels.hopper_rows import hopper_product_kernel, hopper_up_kernel
from ..kernels.hopper_score_gradient import SLICE, hopper_score_gradient_kernel
from ..kernels.hopper_weight_gradient import hopper_weight_gradient_kernel
from ..tuning import RowConfig, WeightConfig
from .launch import launch

_ROWS = 64  # rows of one computing warpgroup
_GL_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_ENDLESS = 0x7FFF0000
_ORIGIN = 1 << 30
_layouts: dict[tuple, gl.NVMMASharedLayout] = {}


def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    key = (block, dtype)
    if key not in _layouts:
        _layouts[key] = gl.NVMMASharedLayout.get_default_for(list(block), _GL_DTYPE[dtype])
    return _layouts[key]


def _descriptor(t: torch.Tensor, shape, strides, block: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor without the checks of its constructor, which take longer than the launch.

    They hold here: `aligned` and `validation` see to 16-byte starts and rows.
    """
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = t, shape, strides, list(block)
    made.layout, made.padding = _layout(block, t.dtype), "zero"
    return made


def boxes(t: torch.Tensor, *block: int) -> TensorDescriptor:
    """Boxes of a tensor as it is, zeros outside of it."""
    return _descriptor(t, list(t.shape), list(t.stride()), block)


def row_boxes(t: torch.Tensor, *block: int) -> TensorDescriptor:
    """Boxes of rows that end with their expert: see `kernels.ragged`."""
    stride = t.stride(0)
    shape = [_ENDLESS, _ENDLESS, _ORIGIN, *t.shape[1:]]
    strides = [2**34 - stride, stride, *t.stride()]
    return _descriptor(t, shape, strides, (1, 1, *block))


def _weights(
    w: torch.Tensor, config: RowConfig, two_halves: bool = False
) -> tuple[TensorDescriptor, bool]:
    """Boxes of (E, N, K) weights, and whether they lie in memory as (E, K, N)."""
    n, k = config.block_n, config.block_k
    transposed = w.stride(2) != 1
    if not two_halves:
        return (boxes(w.mT, 1, k, n) if transposed else boxes(w, 1, n, k)), transposed
    experts, columns, depth = w.shape[0], w.shape[1] // 2, w.shape[2]
    if transposed:
        return boxes(w.mT.view(experts, depth, 2, columns), 1, k, 1, n // 2), True
    return boxes(w.view(experts, 2, columns, depth), 1, 2, n // 2, k), False


def up(x, w1, b1, row_token, z, a, tiles, value, concatenated, keep_z, config, programs):
    weights, transposed = _weights(w1, config, concatenated)
    piece = config.block_n // 4
    n, hidden = w1.shape[1:]
    stored_z = z if keep_z else a.new_empty(1, n)
    z_boxes = (
        row_boxes(stored_z.view(-1, 2, n // 2), _ROWS, 1, piece)
        if concatenated
        else row_boxes(stored_z, _ROWS, piece)
    )
    launch(
        hopper_up_kernel, (programs,),
        boxes(x, _ROWS, config.block_k) if row_token is None else x, row_token, weights, b1,
        z_boxes, row_boxes(a, _ROWS, piece), tiles,
        H=hidden, N=n, BN=config.block_n, BK=config.block_k, STAGES=config.stages,
        KN=transposed, TWO_HALVES=concatenated, ACTIVATION=value, KEEP_Z=keep_z,
        GATHER=row_token is not None, num_warps=4,
    )  # fmt: skip


def product(a, w, bias, row_scores, y, tiles, config: RowConfig, programs: int):
    weights, transposed = _weights(w, config)
    launch(
        hopper_product_kernel, (programs,),
        boxes(a, _ROWS, config.block_k), weights, bias, row_scores,
        row_boxes(y, _ROWS, config.block_n), tiles,
        K=w.shape[2], N=w.shape[1], BN=config.block_n, BK=config.block_k, STAGES=config.stages,
        KN=transposed, num_warps=4,
    )  # fmt: skip


def score_gradient(
    dout, row_token, w2, scores, row_slot, z, dz, a, partial, tiles,
    derivative, concatenated, store_a, store_partial, config, programs,
):  # fmt: skip
    width = SLICE.value
    weights, transposed = _weights(w2.mT, config)
    intermediate = w2.shape[2]
    if concatenated:
        z_boxes = boxes(z.view(-1, 2, intermediate), _ROWS, 1, width)
        dz_boxes = row_boxes(dz.view(-1, 2, intermediate), _ROWS, 1, width)
    else:
        z_boxes, dz_boxes = boxes(z, _ROWS, 2 * width), row_boxes(dz, _ROWS, 2 * width)
    stored_a = a if store_a else dz.new_empty(1, intermediate)
    launch(
        hopper_score_gradient_kernel, (programs,),
        boxes(dout, _ROWS, config.block_k) if row_token is None else dout, row_token, weights,
        scores, row_slot, z_boxes, dz_boxes, row_boxes(stored_a, _ROWS, width),
        partial, partial.stride(0), tiles,
        H=w2.shape[1], I=intermediate, BN=config.block_n, BK=config.block_k, STAGES=config.stages,
        KN=transposed, CONCATENATED=concatenated, BACKWARD=derivative,
        STORE_A=store_a, STORE_PARTIAL=store_partial, GATHER=row_token is not None, num_warps=4,
    )  # fmt: skip


def weight_gradient(
    left, left_token, right, right_token, out, add: bool, expert_start, config: WeightConfig,
    programs: int,
):  # fmt: skip
    m, n, k = config.block_m, config.block_n, config.block_k
    experts, rows, columns = out.shape
    token = right_token if left_token is None else left_token
    launch(
        hopper_weight_gradient_kernel, (programs,),
        row_boxes(left, k, m // 2) if left_token is None else left,
        row_boxes(right, k, n) if right_token is None else right,
        token, None if add else boxes(out, 1, m // 2, n // 4), out if add else None,
        expert_start, experts,
        M=rows, N=columns, BM=m, BN=n, BK=k, STAGES=config.stages,
        GATHER_LEFT=left_token is not None, GATHER_RIGHT=right_token is not None, num_warps=4,
    )  # fmt: skip
