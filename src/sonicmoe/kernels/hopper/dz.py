"""The dZ GEMM on Hopper: dA' = dO W2 in the accumulator; the epilogue makes dZ, A' and dS from it.

The epilogue walks over slices of 32 columns: see `slices.ZSlices`. dZ takes the place of Z. Z in
e4m3 takes the first half of its buffer, and its scales are loaded under the last wgmma.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .consumer import run
from .epilogue import halves, store_box
from .gluon_compat import aggregate
from .ring import CONSUMER_M, accumulator_layout, assume_layout, buffers, make_ring
from .slices import (
    BUFFERS,
    SLICE,
    ZSlices,
    boxes_of_slice,
    derivatives,
    make_z_slices,
    read_slice,
    store_slice,
    write_slice,
)

PRODUCER_REGISTERS = gl.constexpr(40)
L = gl.constexpr(accumulator_layout(SLICE.value, gl.bfloat16))  # of a slice of the accumulator
ROWS = gl.constexpr(gl.SliceLayout(1, L.value))
# Layout of (64, 8) partial sums of dS: (64, 32) would take twelve registers more.
SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
)


@gluon.jit
def _in_fp32(z, exponent):
    """Z in fp32, times 2^(exponent − 127) of its row if it is in e4m3."""
    if z.dtype == gl.float8e4nv:
        scale = ((exponent & 0xFF) << 23).to(gl.float32, bitcast=True)
        return z.to(gl.float32) * scale[:, None]
    else:
        return z.to(gl.float32)


@aggregate
class Epilogue:
    """dZ, A' and sums of dS, from dA' and Z."""

    z: ZSlices
    z_scale: gl.tensor | gl.constexpr  # None unless Z is in e4m3
    num_rows: gl.tensor
    dz: tma.tensor_descriptor
    a: tma.tensor_descriptor
    scores: gl.tensor | gl.constexpr  # may be None
    row_slot: gl.tensor | gl.constexpr  # None if rows arrive sorted
    partial: gl.tensor
    plane: gl.tensor
    a_smem: gl.shared_memory_descriptor  # two slices for each consumer
    I: gl.constexpr
    BACKWARD: gl.constexpr
    STORE_A: gl.constexpr
    STORE_PARTIAL: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def look_up(self, tile):
        return (tile.indices(self.row_slot),)

    @gluon.jit
    def before(self, tile, slot):
        self.z.load_first(tile)
        if self.scores is None:
            score = gl.full((CONSUMER_M,), 1.0, gl.float32, ROWS)
        else:
            score = gl.load(self.scores + slot, mask=tile.inside(), other=0.0)
        return slot, score

    @gluon.jit
    def apply(self, acc, tile, slot, score):
        exponents = self.exponents(tile)
        ds = gl.zeros((CONSUMER_M, SLICE // 4), gl.float32, SUMS)
        ds, _ = self.z.walk(self, acc.wait(), tile, score, (ds, exponents))
        if self.STORE_PARTIAL:
            sums = assume_layout(gl.sum(ds, 1), ROWS)
            plane = self.partial + tile.n * self.plane.to(gl.int64)
            gl.store(plane + slot, sums, mask=tile.inside())

    @gluon.jit
    def exponents(self, tile):
        """Exponents of the scales of a tile's blocks of Z, at most 4, a byte each: four scales
        would take six registers more. Past the last block, where Z is zero, that of the last."""
        packed = gl.zeros_like(tile.r)
        if self.z_scale is not None:
            BLOCK: gl.constexpr = 128 if self.z.GATE_UP is None else 64
            BLOCKS: gl.constexpr = self.z.LAPS * BUFFERS * SLICE // BLOCK
            for b in gl.static_range(BLOCKS):
                block = gl.minimum(tile.n * BLOCKS + b, (self.I + BLOCK - 1) // BLOCK - 1)
                plane = self.z_scale + block * self.num_rows.to(gl.int64)
                scale = tile.load(plane, 0.0)
                packed = packed | (scale.to(gl.int32, bitcast=True) >> 23 << 8 * b)
        return packed

    @gluon.jit
    def slice(self, acc, tile, column, lap, i: gl.constexpr, score, state):
        """Store dZ and A' of slice i of a lap; add dA'·A to ds (64, 8), sums of four columns each.

        The lowest byte of `exponents` is that of the lap's first slice.
        """
        ds, exponents = state
        PER_LAP: gl.constexpr = 1 if self.z.GATE_UP is None else 2  # blocks of Z in BUFFERS slices
        exponent = exponents >> 8 * (i * PER_LAP // BUFFERS)
        if self.z_scale is not None and i == BUFFERS - 1:
            exponents = exponents >> 8 * PER_LAP
        buffer: gl.constexpr = tile.CONSUMER * BUFFERS + i
        a_smem = self.a_smem.index(tile.CONSUMER * 2 + i % 2)
        GATE_UP: gl.constexpr = self.z.GATE_UP
        acc = assume_layout(acc, L)
        weight = score[:, None]
        gate, up = read_slice(self.z.source, self.z.smem, buffer, L, GATE_UP)
        gate, up = _in_fp32(gate, exponent), _in_fp32(up, exponent)
        value, dgate, dup = derivatives(self.BACKWARD, gate, up, acc * weight, GATE_UP)
        write_slice(dgate, dup, self.dz, self.z.smem, buffer, GATE_UP)
        if self.STORE_A:
            a_smem.store((value * weight).to(self.a.dtype))
        fence_async_shared()
        store_slice(self.dz, tile, column, self.z.smem, buffer, GATE_UP)
        if self.STORE_A:
            store_box(self.a, tile, column, a_smem)
        left, right = halves(acc * value)
        left, right = halves(left + right)
        return ds + assume_layout(left + right, SUMS), exponents


@gluon.jit(do_not_specialize=["plane", "num_rows"])
def hopper_dz_kernel(
    dout, row_token, w2, lora_u, lora_b, scores, row_slot, z, z_scale, dz, a, partial, plane, tiles,
    num_rows,
    H: gl.constexpr, I: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_LAYOUT: gl.constexpr, GATE_UP: gl.constexpr, BACKWARD: gl.constexpr,
    STORE_A: gl.constexpr, STORE_PARTIAL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """dZ (R, N), A' (R, I) and partial sums of dS (I/BLOCK_N, plane ≥ S) from dO and Z.

    dA' = dO W2, with LoRA dO W2 + U Bᵀ. GATE_UP is as in `triton.gemm.up_kernel`. Rows of dO are
    gathered if GATHER. With `z_scale` Z is in e4m3.

    Grid: one program per SM; each owns the tiles that it writes.
    """
    ring = make_ring(
        dz.dtype, w2, tiles, H, I, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, None, GATHER
    )
    STORES: gl.constexpr = boxes_of_slice(GATE_UP) + STORE_A
    z_slices = make_z_slices(z, dz.dtype, GATE_UP, BLOCK_N, STORES)
    a_smem = buffers(dz.dtype, 4, [CONSUMER_M, SLICE])
    epilogue = Epilogue(
        z=z_slices, z_scale=z_scale, num_rows=num_rows, dz=dz, a=a, scores=scores,
        row_slot=row_slot, partial=partial, plane=plane, a_smem=a_smem, I=I, BACKWARD=BACKWARD,
        STORE_A=STORE_A, STORE_PARTIAL=STORE_PARTIAL, ROWS=ROWS,
    )  # fmt: skip
    run(ring, epilogue, dout, row_token, w2, lora_u, lora_b, PRODUCER_REGISTERS)
