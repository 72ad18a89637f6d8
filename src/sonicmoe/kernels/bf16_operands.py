"""Operands in bf16 for the weight gradients and the adapters of experts in FP8."""

import triton
import triton.language as tl

from .quantize import BLOCK_FLOOR, power_of_two_scale
from .tile_order import load_tile
from .triton.tile import pairs


@triton.jit(do_not_specialize=["rows"])
def dequantize_rows_kernel(
    q, scale, out, rows, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
):  # fmt: skip
    """out (R, N) bf16 = q e4m3 times the scale (R,) of its row, or (N/BLOCK_N, R) if BLOCK_SCALES.

    Grid: (R/BLOCK_M, N/BLOCK_N); a program owns one block.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    used = row < rows
    inside = used[:, None] & (n < N)[None, :]
    offset = row.to(tl.int64)[:, None] * N + n[None, :]
    if BLOCK_SCALES:
        scale += tl.program_id(1) * rows.to(tl.int64)
    s = tl.load(scale + row, mask=used, other=0.0)
    values = tl.load(q + offset, mask=inside, other=0.0).to(tl.float32) * s[:, None]
    tl.store(out + offset, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def scored_activation_kernel(
    z, zmax, scores, row_slot, a, tiles, rows,
    I: tl.constexpr, GATE_UP: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """A' (R, I) = score · act(Z); rows of no expert are not written.

    BLOCK_I is 128: a program reads one block of Z in e4m3, if there is a zmax (I/128, R).

    Grid: (tiles, BLOCK_M/ROWS, I/BLOCK_I); a program owns ROWS rows of a tile.
    """
    index = tl.program_id(0)
    if index < tl.load(tiles):
        _, start, end, number = load_tile(tiles, index)
        row = start + number * BLOCK_M + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        used = row < end
        column = tl.program_id(2) * BLOCK_I
        i = column + tl.arange(0, BLOCK_I)
        inside = used[:, None] & (i < I)[None, :]
        row_64 = row.to(tl.int64)[:, None]
        scale = tl.full((ROWS, 1), 1.0, tl.float32)
        if zmax is not None:
            plane = tl.program_id(2) * rows.to(tl.int64)
            largest = tl.load(zmax + plane + row, mask=used, other=0.0)
            scale = power_of_two_scale(largest, BLOCK_FLOOR)[:, None]
        if GATE_UP == "interleaved":
            n = 2 * column + tl.arange(0, 2 * BLOCK_I)
            both_inside = used[:, None] & (n < 2 * I)[None, :]
            both = tl.load(z + row_64 * (2 * I) + n[None, :], mask=both_inside, other=0.0)
            gate, up = pairs(both.to(tl.float32) * scale, ROWS, 2 * BLOCK_I)
            value = ACTIVATION(gate, up)
        elif GATE_UP == "concatenated":
            gates = z + row_64 * (2 * I) + i[None, :]
            gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(gates + I, mask=inside, other=0.0).to(tl.float32)
            value = ACTIVATION(gate * scale, up * scale)
        else:
            gate = tl.load(z + row_64 * I + i[None, :], mask=inside, other=0.0).to(tl.float32)
            value = ACTIVATION(gate * scale)
        if scores is not None:
            slot = row if row_slot is None else tl.load(row_slot + row, mask=used, other=0)
            value *= tl.load(scores + slot, mask=used, other=0.0)[:, None]
        tl.store(a + row_64 * I + i[None, :], value.to(a.dtype.element_ty), mask=inside)
