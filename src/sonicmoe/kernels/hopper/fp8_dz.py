"""The dZ GEMM in FP8 on Hopper: dO W2 in the accumulator; the epilogue makes dZ, dZᵀ, A'ᵀ and dS.

As in `dz`, the epilogue walks over slices of 32 columns. Once a slice of Z is in registers, its
buffer takes dZ and dZᵀ, which have half its bytes each. Z in e4m3 takes the first half.

All scales are known before: `DzScales` has factors of rows, columns and blocks of columns, and the
scales of Z in e4m3 follow from zmax. They wait in shared memory, because the epilogue has no
registers for them. In dZᵀ and A'ᵀ the rows of a tile are in the order that
`fp8_wgrad.exchange` explains.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, tma

from ..quantize import BLOCK_FLOOR, power_of_two_scale
from .consumer import run
from .epilogue import even_and_odd, halves
from .gluon_compat import aggregate, barrier, copy_gathered, copy_out, reinterpreted
from .ragged import ORIGIN, store_rows
from .ring import CONSUMER_M, accumulator_layout, assume_layout, buffers, make_ring, view
from .slices import BUFFERS, INTERLEAVED, SLICE, ZSlices, derivatives, make_z_slices, read_slice

PRODUCER_REGISTERS = gl.constexpr(40)
F8 = gl.constexpr(gl.float8e4nv)
# The factors of a row, in the order of `DzScales.row_factors`.
TO_DA, SCORE, TO_DZ, TO_DZ_T, TO_A_T = map(gl.constexpr, range(5))
FACTORS = gl.constexpr(5)
L = gl.constexpr(accumulator_layout(SLICE.value, gl.float8e4nv))  # of a slice of the accumulator
ROWS = gl.constexpr(gl.SliceLayout(1, L.value))
# Partial sums of dS (64, 4): a thread holds one of each of its rows.
SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 4],
    )
)


@gluon.jit
def _per_row(smem, index):
    """Numbers (64, 1) of a consumer's rows, from shared memory."""
    return smem.index(index).load(ROWS)[:, None]


@gluon.jit
def _packed_rows(value):
    """(64, 32) → (32, 32) int16: rows r and r + 8 of sixteen as e4m3. A thread holds both.

    They are stored transposed as 16-bit elements, because stmatrix cannot transpose single bytes.
    This makes the order of rows in dZᵀ and A'ᵀ: see `fp8_wgrad.exchange`.
    """
    upper, lower = gl.split(gl.permute(gl.reshape(value, (4, 2, 8, SLICE)), (0, 2, 3, 1)))
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 first, second;
        cvt.rn.satfinite.e4m3x2.f32 first, $3, $1;
        cvt.rn.satfinite.e4m3x2.f32 second, $4, $2;
        mov.b32 $0, {first, second};
        }""",
        "=r,f,f,f,f",
        [gl.reshape(upper, (CONSUMER_M // 2, SLICE)), gl.reshape(lower, (CONSUMER_M // 2, SLICE))],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )


@aggregate
class Epilogue:
    """dZ, dZᵀ, A'ᵀ and sums of dS, from dA' and Z."""

    factors: gl.tensor
    column_factors: gl.tensor | gl.constexpr  # None unless STORE_T
    block_factors: gl.tensor | gl.constexpr  # None unless STORE_A
    rows: gl.tensor
    zmax: gl.tensor | gl.constexpr  # None unless Z is in e4m3
    z: ZSlices
    dz: tma.tensor_descriptor
    dz_t: tma.tensor_descriptor
    a_t: tma.tensor_descriptor
    row_slot: gl.tensor | gl.constexpr  # None if rows arrive sorted
    partial: gl.tensor
    plane: gl.tensor
    a_smem: gl.shared_memory_descriptor  # two slices of A'ᵀ for each consumer
    f_smem: gl.shared_memory_descriptor  # the factors of each consumer's rows
    c_smem: gl.shared_memory_descriptor  # of slices of columns
    b_smem: gl.shared_memory_descriptor  # of their blocks, a lap after the other, for each row
    zmax_smem: gl.shared_memory_descriptor  # and their zmax, a lap after the other
    slot_smem: gl.shared_memory_descriptor  # and their slots
    RANK: gl.constexpr
    I: gl.constexpr
    BACKWARD: gl.constexpr
    STORE_DZ: gl.constexpr
    STORE_T: gl.constexpr
    STORE_A: gl.constexpr
    STORE_PARTIAL: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def look_up(self, tile):
        """The column of dZᵀ and A'ᵀ of the first row; an expert's columns start at a multiple of
        128."""
        return ((tile.start // 128 + tile.expert) * 128 + tile.row - tile.start,)

    @gluon.jit
    def before(self, tile, padded):
        self.z.load_first(tile)
        self.load_factors(tile)
        return (padded,)

    @gluon.jit
    def apply(self, acc, tile, padded):
        values = acc.wait()
        async_copy.wait_group(0)
        to_da = self.f_smem.index(tile.CONSUMER * FACTORS + TO_DA)
        if self.RANK:
            values *= to_da.load(gl.SliceLayout(1, values.type.layout))[:, None]
            values = acc.add_low_rank(values)
        ds = gl.zeros((CONSUMER_M, 4), gl.float32, SUMS)
        ds = self.z.walk(self, values, tile, padded, ds)
        if self.STORE_PARTIAL:
            slot = tile.row + tile.r
            if self.row_slot is not None:
                slot = self.slot_smem.index(tile.CONSUMER).load(ROWS)
            sums = assume_layout(gl.sum(ds, 1), ROWS)
            if not self.RANK:
                # TO_DA is a power of two: multiplying the sums by it equals multiplying each term.
                sums *= to_da.load(ROWS)
            inside = tile.inside()
            plane = self.partial + tile.n * self.plane.to(gl.int64)
            gl.store(plane + slot, sums, mask=inside)

    @gluon.jit
    def load_factors(self, tile):
        """Start the copy of the factors of rows and columns, and of slots, to shared memory."""
        LAPS: gl.constexpr = self.z.LAPS
        each = gl.arange(0, CONSUMER_M, gl.BlockedLayout([1], [32], [4], [0]))  # a row per thread
        mine = tile.row + each
        source = self.factors + mine
        for i in gl.static_range(FACTORS):
            smem = self.f_smem.index(tile.CONSUMER * FACTORS + i)
            copy_gathered(smem, source, mask=mine < tile.end)
            source += self.rows
        if self.zmax is not None:
            for lap in gl.static_range(LAPS):  # a block of 128 columns; past the last, Z is zero
                block = tile.n * LAPS + lap
                inside = (mine < tile.end) & (block < (self.I + 127) // 128)
                source = self.zmax + block * self.rows.to(gl.int64) + mine
                copy_gathered(self.zmax_smem.index(tile.CONSUMER * LAPS + lap), source, mask=inside)
        if self.column_factors is not None:
            WIDTH: gl.constexpr = LAPS * BUFFERS * SLICE
            plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
            target = reinterpreted(self.c_smem, gl.float32, [2, WIDTH], plain).index(tile.CONSUMER)
            column = gl.arange(0, WIDTH, gl.BlockedLayout([WIDTH // 128], [32], [4], [0]))
            column = tile.n * WIDTH + column
            source = self.column_factors + tile.expert.to(gl.int64) * self.I + column
            copy_gathered(target, source, mask=column < self.I)
        if self.block_factors is not None:
            BLOCKS: gl.constexpr = (self.I + 127) // 128
            for lap in gl.static_range(LAPS):
                block = tile.n * LAPS + lap + gl.zeros_like(each)
                source = self.block_factors + tile.expert * BLOCKS + block
                smem = self.b_smem.index(tile.CONSUMER * LAPS + lap)
                copy_gathered(smem, source, mask=block < BLOCKS)
        if self.STORE_PARTIAL and self.row_slot is not None:
            slot_smem = self.slot_smem.index(tile.CONSUMER)
            copy_gathered(slot_smem, self.row_slot + mine, mask=mine < tile.end)
        async_copy.commit_group()

    @gluon.jit
    def factor(self, tile, WHICH: gl.constexpr):
        """The factor WHICH (64, 1), one of TO_DA to TO_A_T, of a consumer's rows."""
        return _per_row(self.f_smem, tile.CONSUMER * FACTORS + WHICH)

    @gluon.jit
    def slice(self, acc, tile, column, lap, i: gl.constexpr, padded, ds):
        """Store dZ, dZᵀ and A'ᵀ of slice i of a lap, add acc·A to ds (64, 4): sums of eight columns
        each. `padded` is the column of dZᵀ and A'ᵀ that the consumer's rows start at."""
        acc = assume_layout(acc, L)
        gate, up, weighted = self.load_slice(acc, tile, lap, i)
        barrier()  # Z has been read: from here on, what is computed can be stored at once
        value, dgate, dup = derivatives(self.BACKWARD, gate, up, weighted, self.z.GATE_UP)
        left, right = halves(acc * value)
        left, right = halves(left + right)
        even, odd = even_and_odd(left + right)
        self.store_slice(value, dgate, dup, tile, column, lap, i, padded)
        return ds + assume_layout(even + odd, SUMS)

    @gluon.jit
    def load_slice(self, acc, tile, lap, i: gl.constexpr):
        """Gates and ups of a slice, and dA of it, times its row's score."""
        BUFFER: gl.constexpr = tile.CONSUMER * BUFFERS + i
        gate, up = read_slice(self.z.source, self.z.smem, BUFFER, L, self.z.GATE_UP)
        if self.RANK:  # then acc has been multiplied by TO_DA
            weighted = acc * self.factor(tile, SCORE)
        else:
            weighted = acc * (self.factor(tile, TO_DA) * self.factor(tile, SCORE))
        gate, up = gate.to(gl.float32), up.to(gl.float32)
        if self.zmax is not None:
            zmax = _per_row(self.zmax_smem, tile.CONSUMER * self.z.LAPS + lap)
            z_scale = power_of_two_scale(zmax, BLOCK_FLOOR)
            gate, up = gate * z_scale, up * z_scale
        return gate, up, weighted

    @gluon.jit
    def store_slice(self, value, dgate, dup, tile, column, lap, i: gl.constexpr, padded):
        """Store what is needed of a slice of dZ, dZᵀ and A'ᵀ."""
        GATE_UP: gl.constexpr = self.z.GATE_UP
        HALVES: gl.constexpr = 1 if GATE_UP is None else 2
        BUFFER: gl.constexpr = tile.CONSUMER * BUFFERS + i
        A_BUFFER: gl.constexpr = tile.CONSUMER * 2 + i % 2
        LAP = tile.CONSUMER * self.z.LAPS + lap
        # The buffers of Z as twice as many of e4m3: dZ is in the even ones, dZᵀ in the odd ones.
        N: gl.constexpr = 4 * BUFFERS
        dz_rows = view(self.z.smem, F8, N, [CONSUMER_M, HALVES * SLICE]).index(2 * BUFFER)
        dz_halves = view(self.z.smem, F8, N, [HALVES, CONSUMER_M, SLICE]).index(2 * BUFFER)
        dz_t_halves = view(self.z.smem, F8, N, [HALVES, SLICE, CONSUMER_M]).index(2 * BUFFER + 1)
        packed_t = view(self.z.smem, gl.int16, N, [HALVES * SLICE, CONSUMER_M // 2])
        if self.STORE_A:
            packed_a = view(self.a_smem, gl.int16, 4, [SLICE, CONSUMER_M // 2]).index(A_BUFFER)
            factor = self.factor(tile, TO_A_T) * _per_row(self.b_smem, LAP)
            packed_a.permute((1, 0)).store(_packed_rows(value * factor))
        # dZᵀ before dZ: the other way round two registers spill if gate and up are concatenated.
        if self.STORE_T:
            of_columns = self.c_smem.index(LAP * BUFFERS + i)
            factor = self.factor(tile, TO_DZ_T) * of_columns.load(gl.SliceLayout(0, L))[None, :]
            both_t = _packed_rows(dgate * factor)
            if GATE_UP is not None:
                both_t = gl.join(both_t, _packed_rows(dup * factor))
                both_t = gl.reshape(gl.permute(both_t, (0, 2, 1)), (CONSUMER_M // 2, 2 * SLICE))
            packed_t.index(2 * BUFFER + 1).permute((1, 0)).store(both_t)
        if self.STORE_DZ:
            factor = self.factor(tile, TO_DZ)
            if GATE_UP is None:
                dz_rows.store((dgate * factor).to(F8))
            elif GATE_UP == "concatenated":
                both = gl.join((dgate * factor).to(F8), (dup * factor).to(F8))
                dz_halves.store(gl.permute(both, (2, 0, 1)))
            else:
                both = gl.reshape(gl.join(dgate * factor, dup * factor), (CONSUMER_M, 2 * SLICE))
                dz_rows.store(assume_layout(both, INTERLEAVED).to(F8))
        fence_async_shared()
        if self.STORE_DZ:
            if GATE_UP == "concatenated":
                box = dz_halves.reshape([1, 1, 2, CONSUMER_M, SLICE])
                row = ORIGIN - tile.end + tile.row
                copy_out(self.dz, [ORIGIN, tile.end, 0, row, column], box)
            else:
                box = dz_rows.reshape([1, 1, CONSUMER_M, HALVES * SLICE])
                store_rows(self.dz, tile.end, tile.row, HALVES * column, box)
        if self.STORE_T:
            copy_out(self.dz_t, [0, column, padded], dz_t_halves)
        if self.STORE_A:
            copy_out(self.a_t, [column, padded], self.a_smem.index(A_BUFFER))


@gluon.jit(do_not_specialize=["rows", "plane"])
def hopper_fp8_dz_kernel(
    do8, row_token, w2_t, lora_u, lora_b, factors, column_factors, block_factors, rows, row_slot,
    z, zmax, dz, dz_t, a_t, partial, plane, tiles,
    H: gl.constexpr, I: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GATE_UP: gl.constexpr, BACKWARD: gl.constexpr,
    STORE_DZ: gl.constexpr, STORE_T: gl.constexpr, STORE_A: gl.constexpr,
    STORE_PARTIAL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """dZ (R, N), dZᵀ (N, P), A'ᵀ (I, P), all e4m3, and partial sums of dS (I/BLOCK_N, plane ≥ S).

    w2_t is W2 as (E, I, H). With LoRA, lora_u is V = dO B2 (R, r) and lora_b is A2 as (E, I, r).
    The factors are those of `DzScales`, with R = `rows`. zmax (⌈I/128⌉, R) is given if Z is in
    e4m3. GATE_UP is as in `triton.gemm.up_kernel`. Rows of dO are gathered if GATHER.

    Grid: one program per SM; each owns the tiles that it writes. The columns of a tile in dZᵀ and
    A'ᵀ past its expert's end become zeros; columns of no tile are not written.
    """
    ring = make_ring(F8, w2_t, tiles, H, I, RANK, BLOCK_N, BLOCK_K, STAGES, "nk", None, GATHER)
    STORES: gl.constexpr = STORE_DZ + STORE_T + STORE_A
    z_slices = make_z_slices(z, gl.bfloat16, GATE_UP, BLOCK_N, STORES)
    LAPS: gl.constexpr = z_slices.LAPS
    a_smem = buffers(F8, 4, [SLICE, CONSUMER_M])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    f_smem = gl.allocate_shared_memory(gl.float32, [2 * FACTORS, CONSUMER_M], plain)
    c_smem = gl.allocate_shared_memory(gl.float32, [2 * LAPS * BUFFERS, SLICE], plain)
    b_smem = gl.allocate_shared_memory(gl.float32, [2 * LAPS, CONSUMER_M], plain)
    zmax_smem = gl.allocate_shared_memory(gl.float32, [2 * LAPS, CONSUMER_M], plain)
    slot_smem = gl.allocate_shared_memory(gl.int32, [2, CONSUMER_M], plain)
    epilogue = Epilogue(
        factors=factors, column_factors=column_factors, block_factors=block_factors, rows=rows,
        zmax=zmax, z=z_slices, dz=dz, dz_t=dz_t, a_t=a_t, row_slot=row_slot, partial=partial,
        plane=plane, a_smem=a_smem, f_smem=f_smem, c_smem=c_smem, b_smem=b_smem,
        zmax_smem=zmax_smem, slot_smem=slot_smem, RANK=RANK, I=I, BACKWARD=BACKWARD,
        STORE_DZ=STORE_DZ, STORE_T=STORE_T, STORE_A=STORE_A, STORE_PARTIAL=STORE_PARTIAL, ROWS=ROWS,
    )  # fmt: skip
    run(ring, epilogue, do8, row_token, w2_t, lora_u, lora_b, PRODUCER_REGISTERS)
