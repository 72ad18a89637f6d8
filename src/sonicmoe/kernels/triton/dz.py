"""The dZ GEMM: dA' = dO W2 in the accumulator; the epilogue makes dZ, A' and dS from it.

The epilogue reads Z, computes A again, and writes dZ, A' = s·A and the partial sum of the score
gradient dS = ⟨dA', A⟩. It works on column slices of the tile: in one piece it spills 400 registers
at 128×256 and takes 5.2 ms instead of 2.8 (H200, 32768,2048,1024,64,8).
"""

import triton
import triton.language as tl

from ..tile_order import tile_of
from .tile import accumulate, halves, pairs, source_rows


@triton.jit
def _slice_epilogue(
    acc, score, rows, ok, column, z, z_scale, dz, a, num_rows,
    I: tl.constexpr, GATE_UP: tl.constexpr, BACKWARD: tl.constexpr,
    STORE_DZ: tl.constexpr, STORE_A: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
):  # fmt: skip
    """Store dZ and A' of one slice (BLOCK_M, BLOCK_N), return its part of ⟨dA', A⟩ (BLOCK_M,)."""
    i = column + tl.arange(0, BLOCK_N)
    i_ok = ok[:, None] & (i < I)[None, :]
    exists = None if EVEN_N else i_ok
    rows_64 = rows.to(tl.int64)[:, None]
    da = acc * score[:, None]
    if z_scale is not None:  # a slice is part of one block, or past the last
        BLOCK: tl.constexpr = 128 if GATE_UP is None else 64
        block = tl.minimum(column // BLOCK, (I - 1) // BLOCK)
        scales = z_scale + block.to(tl.int64) * num_rows
        z_unit = tl.load(scales + rows, mask=ok, other=0.0)[:, None]
    else:
        z_unit = 1.0
    if GATE_UP == "concatenated":
        z_rows = rows_64 * (2 * I)
        gate = tl.load(z + z_rows + i[None, :], mask=i_ok, other=0.0)
        up = tl.load(z + z_rows + I + i[None, :], mask=i_ok, other=0.0)
        gate, up = _as_fp32(gate, z_unit, exists), _as_fp32(up, z_unit, exists)
        value, dgate, dup = BACKWARD(gate, up, da)
        if STORE_DZ:
            tl.store(dz + z_rows + i[None, :], dgate.to(dz.dtype.element_ty), mask=i_ok)
            tl.store(dz + z_rows + I + i[None, :], dup.to(dz.dtype.element_ty), mask=i_ok)
    elif GATE_UP == "interleaved":
        z_rows = rows_64 * (2 * I)
        n = 2 * column + tl.arange(0, 2 * BLOCK_N)
        n_ok = ok[:, None] & (n < 2 * I)[None, :]
        both = tl.load(z + z_rows + n[None, :], mask=n_ok, other=0.0)
        gate, up = pairs(both, BLOCK_M, 2 * BLOCK_N)
        gate, up = _as_fp32(gate, z_unit, exists), _as_fp32(up, z_unit, exists)
        value, dgate, dup = BACKWARD(gate, up, da)
        if STORE_DZ:
            dtype = dz.dtype.element_ty
            both = tl.interleave(dgate.to(dtype), dup.to(dtype))
            tl.store(dz + z_rows + n[None, :], both, mask=n_ok)
    else:
        z_in = tl.load(z + rows_64 * I + i[None, :], mask=i_ok, other=0.0)
        value, dz_out = BACKWARD(_as_fp32(z_in, z_unit, exists), da)
        if STORE_DZ:
            tl.store(dz + rows_64 * I + i[None, :], dz_out.to(dz.dtype.element_ty), mask=i_ok)
    if STORE_A:
        scaled = (value * score[:, None]).to(a.dtype.element_ty)
        tl.store(a + rows_64 * I + i[None, :], scaled, mask=i_ok)
    return tl.sum(acc * value, 1)


@triton.jit
def _as_fp32(z, z_unit, exists):
    """Z in fp32; `z_unit` is its scale, or 1.0 where Z is not in e4m3."""
    if z.dtype != tl.float8e4nv:
        return z.to(tl.float32)
    elif exists is None:
        return z.to(tl.float32) * z_unit
    else:  # where a mask is always false, ptxas of CUDA 12.8 takes e4m3 for another number than 0
        return tl.where(exists, z.to(tl.float32) * z_unit, 0.0)


@triton.jit(do_not_specialize=["plane", "num_rows"])
def dz_kernel(
    dout, row_token, w2, lora_u, lora_b, scores, row_slot, z, z_scale, dz, a, partial, tiles, plane,
    num_rows,
    w_stride_e, w_stride_n, w_stride_k,
    H: tl.constexpr, I: tl.constexpr, RANK: tl.constexpr,
    GATE_UP: tl.constexpr, BACKWARD: tl.constexpr,
    STORE_DZ: tl.constexpr, STORE_A: tl.constexpr, STORE_PARTIAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    SLICES: tl.constexpr, A_TMA: tl.constexpr, W_TMA: tl.constexpr, WEIGHT_LAYOUT: tl.constexpr,
    PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dZ (R, N), A' (R, I) and partial sums of dS (I/BLOCK_N, plane ≥ S) from dO and Z.

    dA' = dO W2, with LoRA dO W2 + U Bᵀ. GATE_UP is as in `gemm.up_kernel`.

    Grid: any number of programs; each owns the tiles that it writes.
    """
    n_tiles: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    total = tl.load(tiles) * n_tiles
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert, row, end, n_tile = tile_of(tiles, t, H, I, BLOCK_M, BLOCK_N)
        column = n_tile * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        ok = rows < end
        acc = accumulate(
            dout, source_rows(row_token, rows, ok, row), row,
            w2, expert, column, w_stride_e, w_stride_n, w_stride_k, lora_u, lora_b, rows, ok,
            H, I, RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R,
            A_TMA, W_TMA, WEIGHT_LAYOUT, None, PRECISION, UNROLL,
        )  # fmt: skip
        if row_slot is None:
            slot = rows
        else:
            slot = tl.load(row_slot + rows, mask=ok, other=0)
        if scores is None:
            score = tl.full((BLOCK_M,), 1.0, tl.float32)
        else:
            score = tl.load(scores + slot, mask=ok, other=0.0)
        SLICE_N: tl.constexpr = BLOCK_N // SLICES
        if SLICES == 1:
            parts = (acc,)
        elif SLICES == 2:
            parts = halves(acc, BLOCK_M, BLOCK_N)
        else:
            left, right = halves(acc, BLOCK_M, BLOCK_N)
            q0, q1 = halves(left, BLOCK_M, BLOCK_N // 2)
            q2, q3 = halves(right, BLOCK_M, BLOCK_N // 2)
            parts = (q0, q1, q2, q3)
        ds = tl.zeros((BLOCK_M,), tl.float32)
        for s in tl.static_range(SLICES):
            ds += _slice_epilogue(
                parts[s], score, rows, ok, column + s * SLICE_N, z, z_scale, dz, a, num_rows,
                I, GATE_UP, BACKWARD, STORE_DZ, STORE_A, BLOCK_M, SLICE_N, I % BLOCK_N == 0,
            )  # fmt: skip
        if STORE_PARTIAL:
            tl.store(partial + n_tile * plane.to(tl.int64) + slot, ds, mask=ok)
