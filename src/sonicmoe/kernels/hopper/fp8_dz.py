"""The dZ GEMM in FP8 on Hopper: dO W2 in the accumulator; the epilogue makes dZ, dZᵀ, A'ᵀ and dS.

As in `dz`, a consumer warpgroup walks over slices of 32 columns, and Z arrives `BUFFERS` slices
ahead. Once a slice of Z is in registers, its buffer takes dZ and dZᵀ, which have half its bytes
each, and is free again when their stores have been waited for. Z in e4m3 takes the first half.

All scales are known before: `DzScales` has factors of rows, columns and blocks of columns, and the
scales of Z in e4m3 follow from zmax. They wait in shared memory, because the epilogue has no
registers for them. In dZᵀ and A'ᵀ the rows of a tile are in the order that
`fp8_wgrad.exchange` explains.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from ..quantize import BLOCK_FLOOR, power_of_two_scale
from .dz import BUFFERS, ZSlices, make_z_slices
from .epilogue import (
    INTERLEAVED,
    SLICE,
    assume_layout,
    even_and_odd,
    halves,
    quarters,
    read_slice,
)
from .gluon_compat import aggregate, barrier, copy_gathered, copy_out, reinterpreted
from .ragged import ORIGIN, store_rows
from .ring import CONSUMER_M, accumulator_layout, buffers, make_ring, producer

F8 = gl.constexpr(gl.float8e4nv)
# The factors of a row, in the order of `DzScales.row_factors`.
TO_DA, SCORE, TO_DZ, TO_DZ_T, TO_A_T = map(gl.constexpr, range(5))
FACTORS = gl.constexpr(5)
TILE_M = gl.constexpr(128)
L = gl.constexpr(accumulator_layout(SLICE.value, gl.float8e4nv))  # of a slice of the accumulator
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


@aggregate
class Epilogue:
    """What a consumer's epilogue reads and writes."""

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
    RANK: gl.constexpr  # if not 0, the accumulator is dA': it has been multiplied by TO_DA
    LAPS: gl.constexpr  # over the buffers of Z, per tile
    I: gl.constexpr
    BACKWARD: gl.constexpr
    STORE_DZ: gl.constexpr
    STORE_T: gl.constexpr
    STORE_A: gl.constexpr
    STORE_PARTIAL: gl.constexpr


@gluon.jit
def _view(smem, dtype: gl.constexpr, COUNT: gl.constexpr, SHAPE: gl.constexpr):
    """Shared memory as COUNT tensors of another dtype and shape."""
    ALL: gl.constexpr = [COUNT] + SHAPE
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    return reinterpreted(smem, dtype, ALL, LAYOUT)


@gluon.jit
def _per_row(smem, index):
    """Numbers (64, 1) of a consumer's rows, from shared memory."""
    return smem.index(index).load(gl.SliceLayout(1, L))[:, None]


@gluon.jit
def _factor(CONSUMER: gl.constexpr, e, WHICH: gl.constexpr):
    """The factor WHICH (64, 1), one of TO_DA to TO_A_T, of a consumer's rows."""
    return _per_row(e.f_smem, CONSUMER * FACTORS + WHICH)


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


@gluon.jit
def _slice(CONSUMER: gl.constexpr, e, acc, tile, column, padded, lap, i: gl.constexpr):
    """Store dZ, dZᵀ and A'ᵀ of slice i of a lap, return acc·A (64, 4): sums of eight columns each.

    `padded` is the column of dZᵀ and A'ᵀ that the consumer's rows start at.
    """
    GATE_UP: gl.constexpr = e.z.GATE_UP
    HALVES: gl.constexpr = 1 if GATE_UP is None else 2
    BUFFER: gl.constexpr = CONSUMER * BUFFERS + i
    A_BUFFER: gl.constexpr = CONSUMER * 2 + i % 2
    # The buffers of Z as twice as many of e4m3: dZ is in the even ones, dZᵀ in the odd ones.
    N: gl.constexpr = 4 * BUFFERS
    dz_rows = _view(e.z.smem, F8, N, [CONSUMER_M, HALVES * SLICE]).index(2 * BUFFER)
    dz_halves = _view(e.z.smem, F8, N, [HALVES, CONSUMER_M, SLICE]).index(2 * BUFFER)
    dz_t_halves = _view(e.z.smem, F8, N, [HALVES, SLICE, CONSUMER_M]).index(2 * BUFFER + 1)
    packed_t = _view(e.z.smem, gl.int16, N, [HALVES * SLICE, CONSUMER_M // 2]).index(2 * BUFFER + 1)

    gate, up = read_slice(e.z.source, e.z.smem, BUFFER, L, GATE_UP)
    acc = assume_layout(acc, L)
    if e.RANK:
        weighted = acc * _factor(CONSUMER, e, SCORE)
    else:
        weighted = acc * (_factor(CONSUMER, e, TO_DA) * _factor(CONSUMER, e, SCORE))
    gate, up = gate.to(gl.float32), up.to(gl.float32)
    if e.zmax is not None:
        zmax = _per_row(e.zmax_smem, CONSUMER * e.LAPS + lap)
        z_scale = power_of_two_scale(zmax, BLOCK_FLOOR)
        gate, up = gate * z_scale, up * z_scale
    barrier()  # Z has been read: from here on, what is computed can be stored at once
    if GATE_UP is None:
        value, dgate = e.BACKWARD(gate, weighted)
    else:
        value, dgate, dup = e.BACKWARD(gate, up, weighted)
    left, right = halves(acc * value)
    left, right = halves(left + right)
    even, odd = even_and_odd(left + right)
    if e.STORE_A:
        packed_a = _view(e.a_smem, gl.int16, 4, [SLICE, CONSUMER_M // 2]).index(A_BUFFER)
        factor = _factor(CONSUMER, e, TO_A_T)
        factor *= _per_row(e.b_smem, CONSUMER * e.LAPS + lap)
        packed_a.permute((1, 0)).store(_packed_rows(value * factor))
    # dZᵀ before dZ: the other way round two registers spill if gate and up are concatenated.
    if e.STORE_T:
        of_columns = e.c_smem.index((CONSUMER * e.LAPS + lap) * BUFFERS + i)
        factor = _factor(CONSUMER, e, TO_DZ_T) * of_columns.load(gl.SliceLayout(0, L))[None, :]
        both_t = _packed_rows(dgate * factor)
        if GATE_UP is not None:
            both_t = gl.join(both_t, _packed_rows(dup * factor))
            both_t = gl.reshape(gl.permute(both_t, (0, 2, 1)), (CONSUMER_M // 2, 2 * SLICE))
        packed_t.permute((1, 0)).store(both_t)
    if e.STORE_DZ:
        factor = _factor(CONSUMER, e, TO_DZ)
        if GATE_UP is None:
            dz_rows.store((dgate * factor).to(F8))
        elif GATE_UP == "concatenated":
            both = gl.join((dgate * factor).to(F8), (dup * factor).to(F8))
            dz_halves.store(gl.permute(both, (2, 0, 1)))
        else:
            both = gl.reshape(gl.join(dgate * factor, dup * factor), (CONSUMER_M, 2 * SLICE))
            dz_rows.store(assume_layout(both, INTERLEAVED).to(F8))
    fence_async_shared()
    if e.STORE_DZ:
        if GATE_UP == "concatenated":
            box = dz_halves.reshape([1, 1, 2, CONSUMER_M, SLICE])
            copy_out(e.dz, [ORIGIN, tile.end, 0, ORIGIN - tile.end + tile.row, column], box)
        else:
            box = dz_rows.reshape([1, 1, CONSUMER_M, HALVES * SLICE])
            store_rows(e.dz, tile.end, tile.row, HALVES * column, box)
    if e.STORE_T:
        copy_out(e.dz_t, [0, column, padded], dz_t_halves)
    if e.STORE_A:
        copy_out(e.a_t, [column, padded], e.a_smem.index(A_BUFFER))
    return assume_layout(even + odd, SUMS)


@gluon.jit
def _padded_column(tile):
    """The column of dZᵀ and A'ᵀ of the tile's first row; an expert's columns start at a multiple of
    128."""
    return (tile.start // TILE_M + tile.expert) * TILE_M + tile.row - tile.start


@gluon.jit
def _load_factors(CONSUMER: gl.constexpr, e, tile):
    """Start the copy of the factors of rows and columns, and of slots, to shared memory."""
    each = gl.arange(0, CONSUMER_M, gl.BlockedLayout([1], [32], [4], [0]))  # a row per thread
    mine = tile.row + each
    source = e.factors + mine
    for i in gl.static_range(FACTORS):
        copy_gathered(e.f_smem.index(CONSUMER * FACTORS + i), source, mask=mine < tile.end)
        source += e.rows
    if e.zmax is not None:
        for lap in gl.static_range(e.LAPS):  # a block of 128 columns; past the last, Z is zero
            block = tile.n * e.LAPS + lap
            inside = (mine < tile.end) & (block < (e.I + 127) // 128)
            source = e.zmax + block * e.rows.to(gl.int64) + mine
            copy_gathered(e.zmax_smem.index(CONSUMER * e.LAPS + lap), source, mask=inside)
    if e.column_factors is not None:
        WIDTH: gl.constexpr = e.LAPS * BUFFERS * SLICE
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        target = reinterpreted(e.c_smem, gl.float32, [2, WIDTH], plain).index(CONSUMER)
        column = gl.arange(0, WIDTH, gl.BlockedLayout([WIDTH // 128], [32], [4], [0]))
        column = tile.n * WIDTH + column
        source = e.column_factors + tile.expert.to(gl.int64) * e.I + column
        copy_gathered(target, source, mask=column < e.I)
    if e.block_factors is not None:
        BLOCKS: gl.constexpr = (e.I + 127) // 128
        for lap in gl.static_range(e.LAPS):
            block = tile.n * e.LAPS + lap + gl.zeros_like(each)
            source = e.block_factors + tile.expert * BLOCKS + block
            copy_gathered(e.b_smem.index(CONSUMER * e.LAPS + lap), source, mask=block < BLOCKS)
    if e.STORE_PARTIAL and e.row_slot is not None:
        copy_gathered(e.slot_smem.index(CONSUMER), e.row_slot + mine, mask=mine < tile.end)
    async_copy.commit_group()


@gluon.jit
def _consumer(CONSUMER: gl.constexpr, e, ring):
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    STORES: gl.constexpr = e.STORE_DZ + e.STORE_T + e.STORE_A  # of a slice
    ROWS: gl.constexpr = gl.SliceLayout(1, L)
    r = gl.arange(0, CONSUMER_M, ROWS)
    MINE: gl.constexpr = CONSUMER * BUFFERS  # this consumer's first buffer
    step = 0
    laps = 0  # of all tiles so far
    stride = gl.num_programs(0)
    tile = ring.first_tile(CONSUMER)
    padded = _padded_column(tile)
    for index in range(gl.program_id(0), ring.total, stride):
        entry = ring.load_entry(index + stride)
        tma.store_wait(0)
        for s in gl.static_range(BUFFERS):
            e.z.load(tile, tile.n * ring.BLOCK_N + s * SLICE, MINE + s)
        _load_factors(CONSUMER, e, tile)
        acc, step = ring.accumulate(step, CONSUMER)
        following = ring.locate(index + stride, entry, CONSUMER)
        next_padded = _padded_column(following)
        acc = ring.finish(acc, step)
        async_copy.wait_group(0)
        if e.RANK:
            to_da = e.f_smem.index(CONSUMER * FACTORS + TO_DA)
            acc *= to_da.load(gl.SliceLayout(1, acc.type.layout))[:, None]
            acc, step = ring.add_low_rank(acc, step, CONSUMER)
        ds = gl.zeros((CONSUMER_M, 4), gl.float32, SUMS)
        now, then = acc, acc
        if e.LAPS == 2:
            now, then = halves(acc)
        # Not unrolled, because of the instruction cache: see `dz`.
        for lap in range(e.LAPS):
            slices = quarters(now)
            for i in gl.static_range(BUFFERS):
                column = tile.n * ring.BLOCK_N + (lap * BUFFERS + i) * SLICE
                mbarrier.wait(e.z.full.index(MINE + i), laps + lap & 1)
                ds += _slice(CONSUMER, e, slices[i], tile, column, padded, lap, i)
                # Only this slice's stores are still in flight: the buffer before it is free and
                # takes a slice of the next lap. The last buffer is filled during that lap.
                tma.store_wait(STORES)
                if lap == 1 if i == 0 else lap + 1 < e.LAPS:
                    e.z.load(tile, column + (BUFFERS - 1) * SLICE, MINE + (i - 1) % BUFFERS)
            now = then
        laps += e.LAPS
        if e.STORE_PARTIAL:
            slot = tile.row + r
            if e.row_slot is not None:
                slot = e.slot_smem.index(CONSUMER).load(ROWS)
            sums = assume_layout(gl.sum(ds, 1), ROWS)
            if not e.RANK:
                # TO_DA is a power of two: multiplying the sums by it equals multiplying each term.
                sums *= e.f_smem.index(CONSUMER * FACTORS + TO_DA).load(ROWS)
            ok = tile.row + r < tile.end
            gl.store(e.partial + tile.n * e.plane.to(gl.int64) + slot, sums, mask=ok)
        tile, padded = following, next_padded
    tma.store_wait(0)


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
    z_slices = make_z_slices(z, gl.bfloat16, GATE_UP)
    LAPS: gl.constexpr = BLOCK_N // SLICE // BUFFERS
    a_smem = buffers(F8, 4, [SLICE, CONSUMER_M])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    f_smem = gl.allocate_shared_memory(gl.float32, [2 * FACTORS, CONSUMER_M], plain)
    c_smem = gl.allocate_shared_memory(gl.float32, [2 * LAPS * BUFFERS, SLICE], plain)
    b_smem = gl.allocate_shared_memory(gl.float32, [2 * LAPS, CONSUMER_M], plain)
    zmax_smem = gl.allocate_shared_memory(gl.float32, [2 * LAPS, CONSUMER_M], plain)
    slot_smem = gl.allocate_shared_memory(gl.int32, [2, CONSUMER_M], plain)
    epilogue = Epilogue(
        factors, column_factors, block_factors, rows, zmax, z_slices, dz, dz_t, a_t, row_slot,
        partial, plane, a_smem, f_smem, c_smem, b_smem, zmax_smem, slot_smem, RANK, LAPS, I,
        BACKWARD, STORE_DZ, STORE_T, STORE_A, STORE_PARTIAL,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (0, epilogue, ring)),
            (_consumer, (1, epilogue, ring)),
            (producer, (ring, do8, row_token, w2_t, lora_u, lora_b)),
        ],
        [4, 4 if GATHER else 1],
        [232, 40],
    )
