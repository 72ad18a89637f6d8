"""The dZ GEMM on Hopper: dA' = dO W2 in the accumulator; the epilogue makes dZ, A' and dS from it.

The main loop is in `ring`. In the epilogue a consumer warpgroup walks over slices of 32 columns. Z
arrives in shared memory by TMA, `BUFFERS` slices ahead, the first of them under the main loop. dZ
overwrites Z there and leaves by TMA; the buffer is free again when that store has been waited for.
Z in e4m3 takes the first half of its buffer, and its scales are loaded under the last wgmma.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .epilogue import (
    SLICE,
    assume_layout,
    boxes_of_slice,
    halves,
    quarters,
    read_slice,
    slice_buffers,
    store_box,
    store_slice,
    write_slice,
    z_buffer,
)
from .gluon_compat import aggregate
from .ragged import load_rows, load_rows_of_half
from .ring import CONSUMER_M, accumulator_layout, buffers, make_ring, producer

BUFFERS = gl.constexpr(4)  # slices of Z in flight per consumer warpgroup
# Layout of (64, 8) partial sums of dS: (64, 32) would take twelve registers more.
SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
)


@aggregate
class ZSlices:
    """Slices of Z on their way through shared memory: BUFFERS for each consumer."""

    source: tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # barriers
    GATE_UP: gl.constexpr

    @gluon.jit
    def load(self, tile, column, buffer):
        """Start the TMA load of the slice at `column` of A."""
        PER_COLUMN: gl.constexpr = 1 if self.GATE_UP is None else 2  # columns of Z per column of A
        SIZE: gl.constexpr = self.source.dtype.primitive_bitwidth // 8
        barrier = self.full.index(buffer)
        mbarrier.expect(barrier, SIZE * CONSUMER_M * PER_COLUMN * SLICE)
        if self.GATE_UP == "concatenated":
            for half in gl.static_range(2):
                box = z_buffer(self.source, self.smem.index(2 * buffer + half))
                box = box.reshape([1, 1, CONSUMER_M, 1, SLICE])
                load_rows_of_half(self.source, tile.end, tile.row, half, column, barrier, box)
        else:
            box = z_buffer(self.source, self.smem.index(buffer))
            box = box.reshape([1, 1, CONSUMER_M, PER_COLUMN * SLICE])
            load_rows(self.source, tile.end, tile.row, PER_COLUMN * column, barrier, box)


@gluon.jit
def make_z_slices(z, dtype: gl.constexpr, GATE_UP: gl.constexpr):
    """Buffers of Z and their barriers; `dtype` is that of the buffers, `z` the descriptor of Z."""
    smem = slice_buffers(dtype, 2 * BUFFERS, GATE_UP)
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=1)
    return ZSlices(z, smem, full, GATE_UP)


@aggregate
class Epilogue:
    """What a consumer's epilogue reads and writes."""

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
    BACKWARD: gl.constexpr
    STORE_A: gl.constexpr
    STORE_PARTIAL: gl.constexpr


@gluon.jit
def _in_fp32(z, exponent):
    """Z in fp32, times 2^(exponent − 127) of its row if it is in e4m3."""
    if z.dtype == gl.float8e4nv:
        scale = ((exponent & 0xFF) << 23).to(gl.float32, bitcast=True)
        return z.to(gl.float32) * scale[:, None]
    else:
        return z.to(gl.float32)


@gluon.jit
def _exponents(e, row, r, ok, first, BLOCKS: gl.constexpr, I: gl.constexpr):
    """Exponents of the scales of BLOCKS ≤ 4 blocks of Z, a byte each: four scales would take six
    registers more. Past the last block, where Z is zero, that of the last."""
    BLOCK: gl.constexpr = 128 if e.z.GATE_UP is None else 64
    packed = gl.zeros_like(r)
    for b in gl.static_range(BLOCKS):
        block = gl.minimum(first + b, (I + BLOCK - 1) // BLOCK - 1)
        plane = e.z_scale + block * e.num_rows.to(gl.int64)
        scale = gl.load(plane + row + r, mask=ok, other=0.0)
        packed = packed | (scale.to(gl.int32, bitcast=True) >> 23 << 8 * b)
    return packed


@gluon.jit
def _slice(CONSUMER: gl.constexpr, e, acc, score, exponent, tile, column, i: gl.constexpr):
    """Store dZ and A' of slice i of a lap, return dA'·A (64, 8): sums of four columns each."""
    buffer: gl.constexpr = CONSUMER * BUFFERS + i
    a_smem = e.a_smem.index(CONSUMER * 2 + i % 2)
    GATE_UP: gl.constexpr = e.z.GATE_UP
    L: gl.constexpr = score.type.layout.parent
    acc = assume_layout(acc, L)
    weight = score[:, None]
    gate, up = read_slice(e.z.source, e.z.smem, buffer, L, GATE_UP)
    gate = _in_fp32(gate, exponent)
    if GATE_UP is None:
        value, dgate = e.BACKWARD(gate, acc * weight)
        dup = dgate
    else:
        value, dgate, dup = e.BACKWARD(gate, _in_fp32(up, exponent), acc * weight)
    write_slice(dgate, dup, e.dz, e.z.smem, buffer, GATE_UP)
    if e.STORE_A:
        a_smem.store((value * weight).to(e.a.dtype))
    fence_async_shared()
    store_slice(e.dz, tile, column, e.z.smem, buffer, GATE_UP)
    if e.STORE_A:
        store_box(e.a, tile, column, a_smem)
    left, right = halves(acc * value)
    left, right = halves(left + right)
    return assume_layout(left + right, SUMS)


@gluon.jit
def _consumer(CONSUMER: gl.constexpr, e, ring):
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    L: gl.constexpr = accumulator_layout(SLICE, ring.a.dtype)
    LAPS: gl.constexpr = ring.BLOCK_N // SLICE // BUFFERS  # over the buffers, per tile
    STORES: gl.constexpr = boxes_of_slice(e.z.GATE_UP) + (1 if e.STORE_A else 0)
    PER_LAP: gl.constexpr = 1 if e.z.GATE_UP is None else 2  # blocks of Z in BUFFERS slices
    r = gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
    MINE: gl.constexpr = CONSUMER * BUFFERS  # this consumer's first buffer
    step = 0
    laps = 0  # of all tiles so far
    stride = gl.num_programs(0)
    tile = ring.first_tile(CONSUMER)
    slot = tile.indices(e.row_slot, r)
    for index in range(gl.program_id(0), ring.total, stride):
        entry = ring.load_entry(index + stride)
        tma.store_wait(0)
        for s in gl.static_range(BUFFERS):
            e.z.load(tile, tile.n * ring.BLOCK_N + s * SLICE, MINE + s)
        ok = tile.row + r < tile.end
        if e.scores is None:
            score = gl.full((CONSUMER_M,), 1.0, gl.float32, gl.SliceLayout(1, L))
        else:
            score = gl.load(e.scores + slot, mask=ok, other=0.0)
        acc, step = ring.accumulate(step, CONSUMER)
        following = ring.locate(index + stride, entry, CONSUMER)
        next_slot = following.indices(e.row_slot, r)
        if e.z_scale is None:
            exponents = r
        else:
            BLOCKS: gl.constexpr = LAPS * PER_LAP
            exponents = _exponents(e, tile.row, r, ok, tile.n * BLOCKS, BLOCKS, ring.N)
        acc = ring.finish(acc, step)
        ds = gl.zeros((CONSUMER_M, SLICE // 4), gl.float32, SUMS)
        now, then = acc, acc
        if LAPS == 2:
            now, then = halves(acc)
        # Not unrolled: eight slices for both warpgroups do not fit the instruction cache. Fetching
        # instructions took 79% of the epilogue of the clamped activation.
        for lap in range(LAPS):
            slices = quarters(now)
            for i in gl.static_range(BUFFERS):
                column = tile.n * ring.BLOCK_N + (lap * BUFFERS + i) * SLICE
                mbarrier.wait(e.z.full.index(MINE + i), laps + lap & 1)
                exponent = exponents >> 8 * (i * PER_LAP // BUFFERS)
                ds += _slice(CONSUMER, e, slices[i], score, exponent, tile, column, i)
                # Only this slice's stores are still in flight: the buffer before it is free and
                # takes a slice of the next lap. The last buffer is filled during that lap.
                tma.store_wait(STORES)
                if lap == 1 if i == 0 else lap + 1 < LAPS:
                    e.z.load(tile, column + (BUFFERS - 1) * SLICE, MINE + (i - 1) % BUFFERS)
            now = then
            if e.z_scale is not None:
                exponents = exponents >> 8 * PER_LAP
        laps += LAPS
        if e.STORE_PARTIAL:
            sums = assume_layout(gl.sum(ds, 1), gl.SliceLayout(1, L))
            gl.store(e.partial + tile.n * e.plane.to(gl.int64) + slot, sums, mask=ok)
        tile, slot = following, next_slot
    tma.store_wait(0)


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
    z_slices = make_z_slices(z, dz.dtype, GATE_UP)
    a_smem = buffers(dz.dtype, 4, [CONSUMER_M, SLICE])
    epilogue = Epilogue(
        z_slices, z_scale, num_rows, dz, a, scores, row_slot, partial, plane, a_smem,
        BACKWARD, STORE_A, STORE_PARTIAL,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (0, epilogue, ring)),
            (_consumer, (1, epilogue, ring)),
            (producer, (ring, dout, row_token, w2, lora_u, lora_b)),
        ],
        [4, 4 if GATHER else 1],
        [232, 40],
    )
