"""Up in FP8 on Hopper: Z = X W1ᵀ + b1 in bf16 or e4m3; A = act(Z) in e4m3, a scale for 128 columns.

The main loop is in `ring`. A tile of a gated activation has 128 gates, then their 128 ups, however
W1 lies in memory: the boxes of its descriptor see to that. So a thread holds both columns of each
element of A.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..quantize import BLOCK_FLOOR, scale_and_inverse
from .epilogue import (
    SLICE,
    assume_layout,
    biased,
    boxes_of_slice,
    column_maxima,
    halves,
    quarters,
    slice_buffers,
    store_slice,
    write_slice,
)
from .gluon_compat import aggregate, reinterpreted
from .ragged import store_rows
from .ring import CONSUMER_M, accumulator_layout, make_ring, producer

BLOCK_K = gl.constexpr(128)
BLOCK_I = gl.constexpr(128)  # columns of A in a tile, which share a scale


@aggregate
class Epilogue:
    """What a consumer's epilogue reads and writes."""

    z: tma.tensor_descriptor
    a: tma.tensor_descriptor
    x_scale: gl.tensor
    row_token: gl.tensor | gl.constexpr  # None if rows arrive sorted
    w_scale: gl.tensor
    b1: gl.tensor | gl.constexpr  # may be None
    zmax: gl.tensor | gl.constexpr  # None unless KEEP_Z
    zmax_columns: gl.tensor | gl.constexpr  # likewise
    a_scale: gl.tensor
    plane: gl.tensor
    smem: gl.shared_memory_descriptor  # two slices of Z for each consumer
    GATE_UP: gl.constexpr
    ACTIVATION: gl.constexpr
    KEEP_Z: gl.constexpr


@gluon.jit
def _side_by_side(left, right):
    """(64, 2C) from two (64, C)."""
    both = gl.permute(gl.join(left, right), (0, 2, 1))
    return gl.reshape(both, (CONSUMER_M, 2 * left.shape[1]))


@gluon.jit
def _store_a(CONSUMER: gl.constexpr, e, quantized, tile):
    """Start the TMA store of A, in place of a slice of Z."""
    BUFFERS: gl.constexpr = 2 if e.GATE_UP is None else 4
    SHAPE: gl.constexpr = [BUFFERS, 1, 1, CONSUMER_M, BLOCK_I]
    LAYOUT: gl.constexpr = e.a.layout
    a_buffer = reinterpreted(e.smem, e.a.dtype, SHAPE, LAYOUT).index(CONSUMER * (BUFFERS // 2))
    a_buffer.reshape([CONSUMER_M, BLOCK_I]).store(quantized)
    fence_async_shared()
    store_rows(e.a, tile.end, tile.row, tile.n * BLOCK_I, a_buffer)


@gluon.jit
def _raise_columns(e, expert, column, z, I: gl.constexpr):
    """Raise the largest |Z| of 32 columns of the expert, of which z (64, 32) has rows."""
    largest = column_maxima(z)
    i = column + gl.arange(0, SLICE, gl.SliceLayout(0, largest.type.layout))[None, :]
    target = e.zmax_columns + expert.to(gl.int64) * I + i
    bits = largest.to(gl.int32, bitcast=True)  # magnitudes compare as the integers that encode them
    gl.atomic_max(target + gl.zeros_like(bits), bits, mask=(i < I) & (bits >= 0), sem="relaxed")


@gluon.jit
def _biased(ring, e, acc, tile, inside):
    """Z (64, BLOCK_N) of a tile plus its bias, in the rows of its expert: the largest |Z| of a
    column is taken over all."""
    rows = inside.to(gl.float32)
    bias = e.b1 + tile.expert * ring.N
    first = tile.n * BLOCK_I
    if e.GATE_UP is None:
        return biased(acc, bias, first, ring.N, 1, rows)
    else:
        I: gl.constexpr = ring.N // 2
        STRIDE: gl.constexpr = 2 if e.GATE_UP == "interleaved" else 1
        gates, ups = halves(acc)
        gates = biased(gates, bias, first, I, STRIDE, rows)
        ups = biased(ups, bias + (1 if e.GATE_UP == "interleaved" else I), first, I, STRIDE, rows)
        L: gl.constexpr = acc.type.layout
        return assume_layout(_side_by_side(gates, ups), L)


@gluon.jit
def _consumer(CONSUMER: gl.constexpr, e, ring):
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    GATED: gl.constexpr = e.GATE_UP is not None
    BOXES: gl.constexpr = boxes_of_slice(e.GATE_UP)
    I: gl.constexpr = ring.N // 2 if GATED else ring.N
    L: gl.constexpr = accumulator_layout(SLICE, ring.a.dtype)
    ROWS: gl.constexpr = gl.SliceLayout(1, L)
    r = gl.arange(0, CONSUMER_M, ROWS)
    step = 0
    stride = gl.num_programs(0)
    tile = ring.first_tile(CONSUMER)
    token = tile.indices(e.row_token, r)
    for index in range(gl.program_id(0), ring.total, stride):
        entry = ring.load_entry(index + stride)
        inside = tile.row + r < tile.end
        x_scale = gl.load(e.x_scale + token, mask=inside, other=0.0)
        scale = x_scale * gl.load(e.w_scale + tile.expert)
        acc, step = ring.accumulate(step, CONSUMER)
        following = ring.locate(index + stride, entry, CONSUMER)
        token = following.indices(e.row_token, r)
        acc = ring.finish(acc, step)
        if e.b1 is not None or ring.RANK:
            acc *= assume_layout(scale, gl.SliceLayout(1, acc.type.layout))[:, None]
            if e.b1 is not None:  # before the adapter: afterwards up to four registers spill
                acc = _biased(ring, e, acc, tile, inside)
            if ring.RANK:
                acc, step = ring.add_low_rank(acc, step, CONSUMER)
            scale = gl.full_like(scale, 1.0)
        if GATED:
            gates, ups = halves(acc)
        else:
            gates, ups = acc, acc
        gate = quarters(gates)
        up = quarters(ups)
        values = ()
        zmax = assume_layout(gl.max(gl.abs(acc), 1), ROWS) * scale
        z_factor = scale
        if e.z.dtype == e.a.dtype:
            z_factor = scale * scale_and_inverse(zmax, BLOCK_FLOOR)[1]
        for i in gl.static_range(4):
            g = assume_layout(gate[i], L) * scale[:, None]
            u = g
            if GATED:
                u = assume_layout(up[i], L) * scale[:, None]
                values = values + (e.ACTIVATION(g, u),)
            else:
                values = values + (e.ACTIVATION(g),)
            if e.KEEP_Z:
                column = tile.n * BLOCK_I + i * SLICE
                _raise_columns(e, tile.expert, column, gl.maximum(gl.abs(g), gl.abs(u)), I)
                if e.z.dtype == e.a.dtype:
                    g = assume_layout(gate[i], L) * z_factor[:, None]
                    u = assume_layout(up[i], L) * z_factor[:, None]
                # The buffer of two slices ago is free; before the first slice, that of A too.
                tma.store_wait(BOXES if i > 0 else 0)
                buffer = 2 * CONSUMER + i % 2
                write_slice(g, u, e.z, e.smem, buffer, e.GATE_UP)
                fence_async_shared()
                store_slice(e.z, tile, column, e.smem, buffer, e.GATE_UP)
        value = _side_by_side(
            _side_by_side(values[0], values[1]), _side_by_side(values[2], values[3])
        )
        value = assume_layout(value, accumulator_layout(BLOCK_I, ring.a.dtype))
        amax = assume_layout(gl.max(gl.abs(value), 1), ROWS)
        block_scale, inverse = scale_and_inverse(amax, BLOCK_FLOOR)
        inverse = assume_layout(inverse, gl.SliceLayout(1, value.type.layout))
        quantized = (value * inverse[:, None]).to(e.a.dtype)
        # A takes the place of the slice of Z before the last, or of both if plain.
        tma.store_wait(BOXES if e.KEEP_Z and GATED else 0)
        _store_a(CONSUMER, e, quantized, tile)
        offset = tile.n * e.plane.to(gl.int64) + tile.row + r
        gl.store(e.a_scale + offset, block_scale, mask=inside)
        if e.KEEP_Z:
            gl.store(e.zmax + offset, zmax, mask=inside)
        tile = following
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["plane"])
def fp8_up_kernel(
    x, row_token, w1, lora_u, lora_b, x_scale, w_scale, b1, z, zmax, zmax_columns, a, a_scale,
    plane, tiles,
    H: gl.constexpr, N: gl.constexpr, RANK: gl.constexpr, STAGES: gl.constexpr,
    GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr, KEEP_Z: gl.constexpr,
):  # fmt: skip
    """Z = X W1ᵀ + b1, with LoRA X W1ᵀ + U Bᵀ + b1, and A = act(Z); by row the largest |Z| and the
    scale of A (⌈I/128⌉, plane).

    Z and zmax are stored if KEEP_Z; the scale of Z in e4m3 follows from zmax. zmax_columns (E, I),
    zero before, gets the largest |Z| of an expert's column. Rows of X are gathered if there is a
    row_token.

    Grid: one program per SM; each owns the tiles of Z and A that it writes.
    """
    GATHER: gl.constexpr = row_token is not None
    BLOCK_N: gl.constexpr = BLOCK_I if GATE_UP is None else 2 * BLOCK_I
    WEIGHTS: gl.constexpr = None if GATE_UP is None else "concatenated"  # boxes of gates and ups
    ring = make_ring(
        a.dtype, w1, tiles, H, N, RANK, BLOCK_N, BLOCK_K, STAGES, "nk", WEIGHTS, GATHER
    )
    smem = slice_buffers(gl.bfloat16, 4, GATE_UP)
    epilogue = Epilogue(
        z, a, x_scale, row_token, w_scale, b1, zmax, zmax_columns, a_scale, plane, smem,
        GATE_UP, ACTIVATION, KEEP_Z,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (0, epilogue, ring)),
            (_consumer, (1, epilogue, ring)),
            (producer, (ring, x, row_token, w1, lora_u, lora_b)),
        ],
        [4, 4 if GATHER else 1],
        [224, 56],
    )
