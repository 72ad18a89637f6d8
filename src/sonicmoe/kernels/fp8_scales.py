"""The scales of dZ, dZᵀ and A'ᵀ: see `reference.fp8_scales`.

Largest magnitudes are compared as the integers that encode them, so that NaN is the largest.
"""

import triton
import triton.language as tl

from .quantize import is_finite, magnitude_bits
from .tile_order import load_tile

E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
MIN_SCALE: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit
def _slope_bound(z, factor, offset, limit):
    """See `reference.fp8_scales.Slope`."""
    return factor * tl.minimum(z, limit, tl.PropagateNan.ALL) + offset


@triton.jit
def _largest_norm(norm, first, I: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of BLOCK column norms (I,) from `first` on."""
    i = first + tl.arange(0, BLOCK)
    bits = magnitude_bits(tl.load(norm + i, mask=i < I, other=0.0))
    return tl.max(bits, 0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "slots"])
def row_bounds_kernel(
    do_scale, do_norm, x_scale, scores, row_token, row_slot, zmax, a_scale, w2_scale, w2_norm,
    tiles, factors, dz_scale, amax, slots, slack, slope, offset, limit, rows,
    I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """dz_scale (R,), the row factors (5, R) and, unless it is None, amax (3, slots) int32.

    zmax is None where 1 bounds the slope. amax gets, at `tile_slot`, the bits of the largest
    ‖dO‖·|s|·x_scale, |s|·do_scale and |s|·do_scale·max|A| of each tile.

    Grid: one program per tile; it owns the tile's rows.
    """
    index = tl.program_id(0)
    if index < tl.load(tiles):
        expert, start, end, number = load_tile(tiles, index)
        row = start + number * BLOCK_M + tl.arange(0, BLOCK_M)
        used = row < end
        token = row if row_token is None else tl.load(row_token + row, mask=used, other=0)
        slot = row if row_slot is None else tl.load(row_slot + row, mask=used, other=0)
        plane = rows.to(tl.int64)
        norms = w2_norm + expert.to(tl.int64) * I
        bits = tl.zeros((BLOCK_M,), tl.int32)
        a_bits = tl.zeros((BLOCK_M,), tl.int32)
        for j in range((I + BLOCK_I - 1) // BLOCK_I):
            of_block = _largest_norm(norms, j * BLOCK_I, I, BLOCK_I)
            if zmax is not None:
                z = tl.load(zmax + j * plane + row, mask=used, other=0.0)
                of_block = of_block * _slope_bound(z, slope, offset, limit)
            bits = tl.maximum(bits, magnitude_bits(of_block))
            a = tl.load(a_scale + j * plane + row, mask=used, other=0.0)
            a_bits = tl.maximum(a_bits, magnitude_bits(a))
        do = tl.load(do_scale + token, mask=used, other=0.0)
        x = tl.load(x_scale + token, mask=used, other=0.0)
        if scores is None:
            s = tl.full((BLOCK_M,), 1.0, tl.float32)
        else:
            s = tl.load(scores + slot, mask=used, other=0.0).to(tl.float32)
        norm = slack * tl.load(do_norm + token, mask=used, other=0.0) * tl.abs(s)
        scale = _scale_to_max(norm * bits.to(tl.float32, bitcast=True))
        tl.store(dz_scale + row, scale, mask=used)
        tl.store(factors + row, do * tl.load(w2_scale + expert), mask=used)
        tl.store(factors + plane + row, s, mask=used)
        tl.store(factors + 2 * plane + row, tl.div_rn(1.0, scale), mask=used)
        tl.store(factors + 3 * plane + row, x, mask=used)
        tl.store(factors + 4 * plane + row, s * do, mask=used)
        if amax is not None:
            a_row = s * do * (E4M3_MAX * a_bits.to(tl.float32, bitcast=True))
            amax += tile_slot(expert, start, BLOCK_M) + number
            tl.store(amax, tl.max(magnitude_bits(norm * x), 0))
            tl.store(amax + slots, tl.max(magnitude_bits(s * do), 0))
            tl.store(amax + 2 * slots, tl.max(magnitude_bits(a_row), 0))


@triton.jit
def tile_slot(expert, start, BLOCK_M: tl.constexpr):
    """A slot for the first tile of an expert whose rows begin at `start`; its others follow."""
    return start // BLOCK_M + expert


@triton.jit
def _scale_to_max(bound):
    """`reference.fp8_scales.scale_to_max`."""
    scale = tl.maximum(bound * (1 / E4M3_MAX), MIN_SCALE)
    return tl.where(is_finite(bound), scale, float("nan"))


@triton.jit(do_not_specialize=["slots"])
def column_scales_kernel(
    amax, expert_start, zmax_columns, w2_norm,
    column_factors, block_factors, dz_t_scale, a_t_scale, slope, offset, limit, slots,
    I: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_M: tl.constexpr, GATE_UP: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
):  # fmt: skip
    """dz_t_scale (E, N) and a_t_scale (E, I), and their inverses column_factors (E, I) and
    block_factors (E, I/BLOCK_I).

    amax (3, slots) is that of `row_bounds_kernel`.

    Grid: (I/BLOCK_I, E); a program owns one block of columns of an expert.
    """
    expert = tl.program_id(1)
    start, end = tl.load(expert_start + expert), tl.load(expert_start + expert + 1)
    amax += tile_slot(expert, start, BLOCK_M)
    tiles = tl.cdiv(end - start, BLOCK_M)
    dz_row = _largest(amax, tiles, BLOCK_I)
    do_row = _largest(amax + slots, tiles, BLOCK_I)
    a_row = _largest(amax + 2 * slots, tiles, BLOCK_I)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside, base = i < I, expert.to(tl.int64) * I
    z = tl.load(zmax_columns + base + i, mask=inside, other=0.0)
    dz = dz_row * tl.load(w2_norm + base + i, mask=inside, other=0.0)
    a = z
    if HAS_SLOPE:
        bound = _slope_bound(z, slope, offset, limit)
        dz *= bound
        a = bound * tl.minimum(z, limit, tl.PropagateNan.ALL)
    a = tl.max(magnitude_bits(tl.where(inside, a, 0.0)), 0).to(tl.float32, bitcast=True)
    dz_scale = _scale_to_max(dz)
    a_scale = _scale_to_max(tl.minimum(do_row * a, a_row, tl.PropagateNan.ALL))
    tl.store(column_factors + base + i, tl.div_rn(1.0, dz_scale), mask=inside)
    block = expert * tl.num_programs(0) + tl.program_id(0)
    tl.store(block_factors + block, tl.div_rn(1.0, a_scale))
    tl.store(a_t_scale + base + i, a_scale, mask=inside)
    if GATE_UP == "interleaved":
        tl.store(dz_t_scale + 2 * (base + i), dz_scale, mask=inside)
        tl.store(dz_t_scale + 2 * (base + i) + 1, dz_scale, mask=inside)
    elif GATE_UP == "concatenated":
        tl.store(dz_t_scale + 2 * base + i, dz_scale, mask=inside)
        tl.store(dz_t_scale + 2 * base + I + i, dz_scale, mask=inside)
    else:
        tl.store(dz_t_scale + base + i, dz_scale, mask=inside)


@triton.jit
def _largest(amax, count, BLOCK: tl.constexpr):
    """The largest of `count` magnitudes, given as bits."""
    largest = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(amax + i, mask=i < count, other=0))
    return tl.max(largest, 0).to(tl.float32, bitcast=True)
