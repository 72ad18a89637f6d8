"""Launch of the weight gradient in FP8."""

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl

from ..kernels.hopper.fp8_wgrad import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    CONSUMER_M,
    hopper_fp8_wgrad_kernel,
)
from ..shapes import ceil_div
from ..tensors import E4M3, Permutation
from . import grouped_gemm
from .descriptors import Boxes
from .launcher import Bound, launch
from .spans import spans_of, sum_spans

STAGES = 3
BUFFERS = 4  # quarters of a consumer's half of a tile that can be stored at once
_M, _N, _K, _CONSUMER_M = BLOCK_M.value, BLOCK_N.value, BLOCK_K.value, CONSUMER_M.value


@lru_cache(maxsize=1024)
def _other_boxes(shape, strides) -> Boxes:
    layout = gl.NVMMASharedLayout.get_default_for([_N, _K], gl.float8e4nv)
    return Boxes(E4M3, shape, strides, (_N, _K), layout)


@lru_cache(maxsize=1024)
def _kernel(dtype, shape, strides, gather, add, stages, buffers):
    """The kernel; boxes of the gradient, None for fp32, which is stored without TMA."""
    experts, m, n = shape
    transposed = strides[2] != 1
    options = {"GATHER": gather, "TRANSPOSED": transposed, "ADD": add}
    options |= {"STAGES": stages, "BUFFERS": buffers}
    kernel = Bound(hopper_fp8_wgrad_kernel, M=m, N=n, **options, num_warps=4)
    if dtype == torch.float32:
        return kernel, None
    block = [1, _CONSUMER_M, _N // 4]
    if transposed:
        shape, strides = (experts, n, m), (strides[0], strides[2], 1)
        block = [1, _N // 4, _CONSUMER_M]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return kernel, Boxes(dtype, shape, strides, block, layout)


def weight_gradient(rows8, other_t, scale, dw, p: Permutation, add=False) -> None:
    """dw (E, M, N), bf16 or fp32, = `reference.fp8.sum_of_products`; added to fp32 dw if `add`.

    dw lies in memory as (E, M, N) or as (E, N, M). M and N are multiples of 16.
    """
    experts, m, n = dw.shape
    programs = grouped_gemm.target_of(rows8).processors
    per_expert = ceil_div(m, _M) * ceil_div(n, _N)
    rows, longest = p.rows_of(rows8), p.most_rows_of_an_expert(rows8)
    spans = spans_of(rows, longest, dw.shape, per_expert, programs, rows8.device, _K)
    kernel, boxes = _kernel(dw.dtype, dw.shape, dw.stride(), p.is_gathered, add, STAGES, BUFFERS)
    outputs = (None, dw) if boxes is None else ((dw, boxes), None)
    split = (p.expert_start, p.tiles, experts, spans.rows, spans.places)
    other = (other_t, _other_boxes(other_t.shape, other_t.stride()))
    grid = (min((experts + spans.places) * per_expert, programs),)
    launch(kernel, grid, rows8, p.row_token, other, scale, *outputs, spans.partial, *split)
    if spans.places:
        kernel = sum_spans(m * n, add)
        launch(kernel, (programs,), spans.partial, dw, *split)
