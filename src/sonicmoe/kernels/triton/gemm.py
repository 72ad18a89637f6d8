"""Grouped GEMMs with one output row for each routed row: up, and the GEMM of down and dX.

The kernels are persistent: programs walk over (M-tile, N-tile) pairs in the order of
`tile_order.corner_of`. A program owns the tiles it writes.
"""

import triton
import triton.language as tl

from ..fp8 import block_maxima, quantized, store_scales
from ..tile_order import tile_of
from .tile import accumulate, halves, pairs, source_rows


@triton.jit(do_not_specialize=["num_rows"])
def up_kernel(
    x, row_token, w1, b1, lora_u, lora_b, z, z_scale, a, tiles, num_rows,
    w_stride_e, w_stride_n, w_stride_k,
    H: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
    GATE_UP: tl.constexpr, ACTIVATION: tl.constexpr, KEEP_Z: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    A_TMA: tl.constexpr, W_TMA: tl.constexpr, WEIGHT_LAYOUT: tl.constexpr,
    PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Z = X W1ᵀ + b1, with LoRA X W1ᵀ + U Bᵀ + b1, and A = act(Z); Z is stored if KEEP_Z.

    GATE_UP is the order of the gate and up columns of a gated activation: "interleaved",
    "concatenated", or None for an activation without a gate. With `z_scale` (N/128, num_rows) Z is
    stored in e4m3.

    Grid: any number of programs; each owns the tiles of Z and A that it writes.
    """
    I: tl.constexpr = N if GATE_UP is None else N // 2
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    dtype = a.dtype.element_ty
    total = tl.load(tiles) * n_tiles
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, n_tile = tile_of(tiles, t, H, N, BLOCK_M, BLOCK_N)
        column = n_tile * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        ok = rows < end
        acc = accumulate(
            x, source_rows(row_token, rows, ok, row), row,
            w1, expert, column // 2 if GATE_UP == "concatenated" else column,
            w_stride_e, w_stride_n, w_stride_k, lora_u, lora_b, rows, ok,
            H, N, RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R,
            A_TMA, W_TMA, WEIGHT_LAYOUT, GATE_UP, PRECISION, UNROLL,
        )  # fmt: skip
        z_rows = z + rows.to(tl.int64)[:, None] * N
        a_rows = a + rows.to(tl.int64)[:, None] * I
        if GATE_UP is not None:
            i = column // 2 + tl.arange(0, BLOCK_N // 2)
            i_ok = ok[:, None] & (i < I)[None, :]
        if GATE_UP == "concatenated":
            gate, up = halves(acc, BLOCK_M, BLOCK_N)
            if b1 is not None:
                bias = b1 + expert * N
                gate += tl.load(bias + i, mask=i < I, other=0.0).to(tl.float32)[None, :]
                up += tl.load(bias + I + i, mask=i < I, other=0.0).to(tl.float32)[None, :]
            if KEEP_Z and z_scale is not None:
                amax = block_maxima(gate, BLOCK_M, BLOCK_N // 2, 64)
                amax = tl.maximum(amax, block_maxima(up, BLOCK_M, BLOCK_N // 2, 64))
                inverse = store_scales(
                    z_scale, amax, rows, ok, column // 128, num_rows, N, BLOCK_N // 128
                )
                gate8 = quantized(gate, inverse, BLOCK_M, BLOCK_N // 2, 64)
                up8 = quantized(up, inverse, BLOCK_M, BLOCK_N // 2, 64)
                tl.store(z_rows + i[None, :], gate8, mask=i_ok)
                tl.store(z_rows + I + i[None, :], up8, mask=i_ok)
            elif KEEP_Z:
                tl.store(z_rows + i[None, :], gate.to(dtype), mask=i_ok)
                tl.store(z_rows + I + i[None, :], up.to(dtype), mask=i_ok)
            tl.store(a_rows + i[None, :], ACTIVATION(gate, up).to(dtype), mask=i_ok)
        else:
            n = column + tl.arange(0, BLOCK_N)
            n_ok = ok[:, None] & (n < N)[None, :]
            if b1 is not None:
                acc += tl.load(b1 + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            if KEEP_Z and z_scale is not None:
                amax = block_maxima(acc, BLOCK_M, BLOCK_N, 128)
                inverse = store_scales(
                    z_scale, amax, rows, ok, column // 128, num_rows, N, BLOCK_N // 128
                )
                z8 = quantized(acc, inverse, BLOCK_M, BLOCK_N, 128)
                tl.store(z_rows + n[None, :], z8, mask=n_ok)
            elif KEEP_Z:
                tl.store(z_rows + n[None, :], acc.to(dtype), mask=n_ok)
            if GATE_UP == "interleaved":
                gate, up = pairs(acc, BLOCK_M, BLOCK_N)
                tl.store(a_rows + i[None, :], ACTIVATION(gate, up).to(dtype), mask=i_ok)
            else:
                tl.store(a_rows + n[None, :], ACTIVATION(acc).to(dtype), mask=n_ok)


@triton.jit
def gemm_kernel(
    a, w, bias, row_scores, lora_u, lora_b, y, tiles,
    w_stride_e, w_stride_n, w_stride_k,
    K: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    A_TMA: tl.constexpr, W_TMA: tl.constexpr, WEIGHT_LAYOUT: tl.constexpr,
    PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Y = (A Wᵀ + bias)·score, with LoRA (A Wᵀ + U Bᵀ + bias)·score, for rows sorted by expert.

    Grid: any number of programs; each owns the tiles of Y that it writes.
    """
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    total = tl.load(tiles) * n_tiles
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, n_tile = tile_of(tiles, t, K, N, BLOCK_M, BLOCK_N)
        column = n_tile * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        ok = rows < end
        n = column + tl.arange(0, BLOCK_N)
        acc = accumulate(
            a, source_rows(None, rows, ok, row), row,
            w, expert, column, w_stride_e, w_stride_n, w_stride_k, lora_u, lora_b, rows, ok,
            K, N, RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R,
            A_TMA, W_TMA, WEIGHT_LAYOUT, None, PRECISION, UNROLL,
        )  # fmt: skip
        if bias is not None:
            acc += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if row_scores is not None:
            acc *= tl.load(row_scores + rows, mask=ok, other=0.0)[:, None]
        out = y + rows.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, acc.to(y.dtype.element_ty), mask=ok[:, None] & (n < N)[None, :])
