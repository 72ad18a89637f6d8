"""Launches of the Hopper kernels: one program a multiprocessor, everything through descriptors."""

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl

from ..kernels.hopper_rows import hopper_product_kernel, hopper_up_kernel
from ..kernels.hopper_score_gradient import SLICE, hopper_score_gradient_kernel
from ..kernels.hopper_weight_gradient import hopper_weight_gradient_kernel
from ..tuning import RowConfig, WeightConfig
from .launch import Boxes, launch

_ROWS = 64  # rows of one computing warpgroup
_GL_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_ENDLESS = 0x7FFF0000
_ORIGIN = 1 << 30


def _laid_out(dtype: torch.dtype, shape, strides, block) -> Boxes:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _GL_DTYPE[dtype])
    return Boxes(dtype, shape, strides, block, layout)


_boxes = lru_cache(maxsize=1024)(_laid_out)


@lru_cache(maxsize=1024)
def _row_boxes(dtype, columns, strides, block) -> Boxes:
    shape = (_ENDLESS, _ENDLESS, _ORIGIN, *columns)
    return _laid_out(dtype, shape, (2**34 - strides[0], strides[0], *strides), (1, 1, *block))


@lru_cache(maxsize=1024)
def _weight_boxes(dtype, shape, strides, n, k, two_halves) -> Boxes:
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


def boxes(t: torch.Tensor, *block: int) -> tuple[torch.Tensor, Boxes]:
    """Boxes of a tensor as it is, zeros outside of it."""
    return t, _boxes(t.dtype, t.shape, t.stride(), block)


def row_boxes(t: torch.Tensor, *block: int) -> tuple[torch.Tensor, Boxes]:
    """Boxes of rows that end with their expert: see `kernels.ragged`."""
    return t, _row_boxes(t.dtype, t.shape[1:], t.stride(), block)


def _weights(
    w: torch.Tensor, config: RowConfig, two_halves: bool = False
) -> tuple[tuple[torch.Tensor, Boxes], bool]:
    """Boxes of (E, N, K) weights, and whether they lie in memory as (E, K, N)."""
    shape, strides = w.shape, w.stride()
    cut = _weight_boxes(w.dtype, shape, strides, config.block_n, config.block_k, two_halves)
    return (w, cut), strides[2] != 1


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
        row_boxes(x, _ROWS, config.block_k) if row_token is None else x, row_token, weights, b1,
        z_boxes, row_boxes(a, _ROWS, piece), tiles,
        H=hidden, N=n, BN=config.block_n, BK=config.block_k, STAGES=config.stages,
        KN=transposed, TWO_HALVES=concatenated, ACTIVATION=value, KEEP_Z=keep_z,
        GATHER=row_token is not None, num_warps=4,
    )  # fmt: skip


def product(a, w, bias, row_scores, y, tiles, config: RowConfig, programs: int):
    weights, transposed = _weights(w, config)
    launch(
        hopper_product_kernel, (programs,),
        row_boxes(a, _ROWS, config.block_k), weights, bias, row_scores,
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
        z_boxes = row_boxes(z.view(-1, 2, intermediate), _ROWS, 1, width)
        dz_boxes = row_boxes(dz.view(-1, 2, intermediate), _ROWS, 1, width)
    else:
        z_boxes, dz_boxes = row_boxes(z, _ROWS, 2 * width), row_boxes(dz, _ROWS, 2 * width)
    stored_a = a if store_a else dz.new_empty(1, intermediate)
    launch(
        hopper_score_gradient_kernel, (programs,),
        row_boxes(dout, _ROWS, config.block_k) if row_token is None else dout, row_token, weights,
        scores, row_slot, z_boxes, dz_boxes, row_boxes(stored_a, _ROWS, width),
        partial, partial.stride(0), tiles,
        H=w2.shape[1], I=intermediate, BN=config.block_n, BK=config.block_k, STAGES=config.stages,
        KN=transposed, CONCATENATED=concatenated, BACKWARD=derivative,
        STORE_A=store_a, STORE_PARTIAL=store_partial, GATHER=row_token is not None, num_warps=4,
    )  # fmt: skip


def weight_gradient(
    left, left_token, right, right_token, out, add: bool, expert_start, tiles, partial, span,
    places, config: WeightConfig, programs: int,
):  # fmt: skip
    m, n, k = config.block_m, config.block_n, config.block_k
    experts, rows, columns = out.shape
    token = right_token if left_token is None else left_token
    launch(
        hopper_weight_gradient_kernel, (programs,),
        row_boxes(left, k, m // 2) if left_token is None else left,
        row_boxes(right, k, n) if right_token is None else right,
        token, None if add else boxes(out, 1, m // 2, n // 4), out if add else None, partial,
        expert_start, tiles, experts, span, places,
        M=rows, N=columns, BM=m, BN=n, BK=k, STAGES=config.stages,
        GATHER_LEFT=left_token is not None, GATHER_RIGHT=right_token is not None, num_warps=4,
    )  # fmt: skip
