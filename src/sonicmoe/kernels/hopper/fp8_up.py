"""Up in FP8 on Hopper: Z = X W1ᵀ + b1 in bf16 or e4m3; A = act(Z) in e4m3, a scale for 128 columns.

A tile of a gated activation has 128 gates, then their 128 ups, however W1 lies in memory: the boxes
of its descriptor see to that. So a thread holds both columns of each element of A.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..quantize import BLOCK_FLOOR, scale_and_inverse
from .consumer import run
from .epilogue import biased, column_maxima, halves, quarters
from .gluon_compat import aggregate, reinterpreted
from .ragged import store_rows
from .ring import CONSUMER_M, accumulator_layout, assume_layout, make_ring
from .slices import SLICE, boxes_of_slice, slice_buffers, store_slice, write_slice

BLOCK_K = gl.constexpr(128)
BLOCK_I = gl.constexpr(128)  # columns of A in a tile, which share a scale
PRODUCER_REGISTERS = gl.constexpr(56)
L = gl.constexpr(accumulator_layout(SLICE.value, gl.float8e4nv))  # of a slice of the accumulator
ROWS = gl.constexpr(gl.SliceLayout(1, L.value))


@gluon.jit
def _side_by_side(left, right):
    """(64, 2C) from two (64, C)."""
    both = gl.permute(gl.join(left, right), (0, 2, 1))
    return gl.reshape(both, (CONSUMER_M, 2 * left.shape[1]))


@aggregate
class Epilogue:
    """Z = acc·scale + b1, with LoRA + U Bᵀ, and A = act(Z) with its scales."""

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
    I: gl.constexpr
    RANK: gl.constexpr
    GATE_UP: gl.constexpr
    ACTIVATION: gl.constexpr
    KEEP_Z: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def look_up(self, tile):
        return (tile.indices(self.row_token),)

    @gluon.jit
    def before(self, tile, token):
        x_scale = gl.load(self.x_scale + token, mask=tile.inside(), other=0.0)
        return (x_scale * gl.load(self.w_scale + tile.expert),)

    @gluon.jit
    def apply(self, acc, tile, scale):
        values, scale = self.scaled(acc, tile, scale)
        zmax = assume_layout(gl.max(gl.abs(values), 1), ROWS) * scale
        value = self.store_z(values, tile, scale, zmax)
        a_scale = self.store_a(value, tile)
        offset = tile.n * self.plane.to(gl.int64) + tile.row + tile.r
        gl.store(self.a_scale + offset, a_scale, mask=tile.inside())
        if self.KEEP_Z:
            gl.store(self.zmax + offset, zmax, mask=tile.inside())

    @gluon.jit
    def scaled(self, acc, tile, scale):
        """Z (64, BLOCK_N), up to the scale that is returned too."""
        z = acc.wait()
        if self.b1 is not None or self.RANK:
            z *= assume_layout(scale, gl.SliceLayout(1, z.type.layout))[:, None]
            if self.b1 is not None:  # before the adapter: afterwards up to four registers spill
                z = self.add_bias(z, tile)
            if self.RANK:
                z = acc.add_low_rank(z)
            scale = gl.full_like(scale, 1.0)
        return z, scale

    @gluon.jit
    def add_bias(self, z, tile):
        """Z (64, BLOCK_N) of a tile plus its bias, in the rows of its expert: the largest |Z| of a
        column is taken over all."""
        I: gl.constexpr = self.I
        rows = tile.inside().to(gl.float32)
        first = tile.n * BLOCK_I
        if self.GATE_UP is None:
            return biased(z, self.b1 + tile.expert * I, first, I, 1, rows)
        else:
            STRIDE: gl.constexpr = 2 if self.GATE_UP == "interleaved" else 1
            UPS: gl.constexpr = 1 if self.GATE_UP == "interleaved" else I
            bias = self.b1 + tile.expert * (2 * I)
            gates, ups = halves(z)
            gates = biased(gates, bias, first, I, STRIDE, rows)
            ups = biased(ups, bias + UPS, first, I, STRIDE, rows)
            LAYOUT: gl.constexpr = z.type.layout
            return assume_layout(_side_by_side(gates, ups), LAYOUT)

    @gluon.jit
    def store_z(self, z, tile, scale, zmax):
        """Store Z·scale in slices if KEEP_Z, return A (64, BLOCK_I)."""
        BOXES: gl.constexpr = boxes_of_slice(self.GATE_UP)
        if self.GATE_UP is not None:
            gates, ups = halves(z)
        else:
            gates, ups = z, z
        gate = quarters(gates)
        up = quarters(ups)
        values = ()
        z_factor = scale
        if self.z.dtype == self.a.dtype:
            z_factor = scale * scale_and_inverse(zmax, BLOCK_FLOOR)[1]
        for i in gl.static_range(4):
            g = assume_layout(gate[i], L) * scale[:, None]
            u = g
            if self.GATE_UP is not None:
                u = assume_layout(up[i], L) * scale[:, None]
                values = values + (self.ACTIVATION(g, u),)
            else:
                values = values + (self.ACTIVATION(g),)
            if self.KEEP_Z:
                column = tile.n * BLOCK_I + i * SLICE
                self.raise_columns(tile.expert, column, gl.maximum(gl.abs(g), gl.abs(u)))
                if self.z.dtype == self.a.dtype:
                    g = assume_layout(gate[i], L) * z_factor[:, None]
                    u = assume_layout(up[i], L) * z_factor[:, None]
                # The buffer of two slices ago is free; before the first slice, that of A too.
                tma.store_wait(BOXES if i > 0 else 0)
                buffer = 2 * tile.CONSUMER + i % 2
                write_slice(g, u, self.z, self.smem, buffer, self.GATE_UP)
                fence_async_shared()
                store_slice(self.z, tile, column, self.smem, buffer, self.GATE_UP)
        left, right = _side_by_side(values[0], values[1]), _side_by_side(values[2], values[3])
        value = _side_by_side(left, right)
        return assume_layout(value, accumulator_layout(BLOCK_I, gl.float8e4nv))

    @gluon.jit
    def raise_columns(self, expert, column, z):
        """Raise the largest |Z| of 32 columns of the expert, of which z (64, 32) has rows."""
        largest = column_maxima(z)
        i = column + gl.arange(0, SLICE, gl.SliceLayout(0, largest.type.layout))[None, :]
        target = self.zmax_columns + expert.to(gl.int64) * self.I + i
        bits = largest.to(
            gl.int32, bitcast=True
        )  # magnitudes compare as the integers of their bits
        mask = (i < self.I) & (bits >= 0)
        gl.atomic_max(target + gl.zeros_like(bits), bits, mask=mask, sem="relaxed")

    @gluon.jit
    def store_a(self, value, tile):
        """Start the TMA store of A, in place of a slice of Z; return the scales of its rows."""
        amax = assume_layout(gl.max(gl.abs(value), 1), ROWS)
        scale, inverse = scale_and_inverse(amax, BLOCK_FLOOR)
        inverse = assume_layout(inverse, gl.SliceLayout(1, value.type.layout))
        quantized = (value * inverse[:, None]).to(self.a.dtype)
        GATED: gl.constexpr = self.GATE_UP is not None
        BUFFERS: gl.constexpr = 4 if GATED else 2  # of A, in the memory of slices of Z
        SHAPE: gl.constexpr = [BUFFERS, 1, 1, CONSUMER_M, BLOCK_I]
        LAYOUT: gl.constexpr = self.a.layout
        buffers = reinterpreted(self.smem, self.a.dtype, SHAPE, LAYOUT)
        buffer = buffers.index(tile.CONSUMER * (BUFFERS // 2))
        # A takes the place of the slice of Z before the last, or of both if plain.
        tma.store_wait(boxes_of_slice(self.GATE_UP) if self.KEEP_Z and GATED else 0)
        buffer.reshape([CONSUMER_M, BLOCK_I]).store(quantized)
        fence_async_shared()
        store_rows(self.a, tile.end, tile.row, tile.n * BLOCK_I, buffer)
        return scale


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
    I: gl.constexpr = N if GATE_UP is None else N // 2
    epilogue = Epilogue(
        z=z, a=a, x_scale=x_scale, row_token=row_token, w_scale=w_scale, b1=b1, zmax=zmax,
        zmax_columns=zmax_columns, a_scale=a_scale, plane=plane, smem=smem, I=I, RANK=RANK,
        GATE_UP=GATE_UP, ACTIVATION=ACTIVATION, KEEP_Z=KEEP_Z, ROWS=ROWS,
    )  # fmt: skip
    run(ring, epilogue, x, row_token, w1, lora_u, lora_b, PRODUCER_REGISTERS)
