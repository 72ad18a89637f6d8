"""The dZ GEMM in FP8 on Hopper: dO W2 in the accumulator; the epilogue makes dZ, dZᵀ, A'ᵀ and dS.

As in `dz`, a consumer warpgroup walks over slices of 32 columns, and Z arrives `BUFFERS` slices
ahead. Once a slice of Z is in registers, its buffer takes dZ and dZᵀ, which have half its bytes
each, and is free again when their stores have been waited for.

All scales are known before: a row has five factors, see `reference.fp8.dz_scales`. They wait in
shared memory, because the epilogue has no registers for them. In dZᵀ and A'ᵀ the rows of a tile are
in the order of `reference.fp8.row_of_place`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from .dz import BUFFERS, SLICE, load_z
from .gluon_compat import barrier, copy_gathered, copy_out, reinterpreted
from .ragged import ORIGIN, store_rows
from .ring import (
    CONSUMER_M,
    accumulate,
    finish,
    halves,
    load_work,
    pairs,
    producer,
    quarters,
    rows_of_work,
    weight_ring,
)

F8 = gl.constexpr(gl.float8e4nv)
FACTORS = gl.constexpr(5)
TILE_M = gl.constexpr(128)
# Layout of a slice of the accumulator.
L = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
)
# fmt: off
# Interleaved Z: a thread holds the gates and ups of its two columns of A.
LZ = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
    [[16, 0], [32, 0]], [], [64, 64],
))
# Partial sums of dS (64, 4): a thread holds one of each of its rows.
SUMS = gl.constexpr(gl.DistributedLinearLayout(
    [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4],
))
# fmt: on


@gluon.constexpr_function
def _layout(shape, dtype):
    return gl.NVMMASharedLayout.get_default_for(shape, dtype)


@gluon.jit
def _view(smem, dtype: gl.constexpr, COUNT: gl.constexpr, SHAPE: gl.constexpr):
    """Shared memory as COUNT tensors of another dtype and shape."""
    ALL: gl.constexpr = [COUNT] + SHAPE
    LAYOUT: gl.constexpr = _layout(SHAPE, dtype)
    return reinterpreted(smem, dtype, ALL, LAYOUT)


@gluon.jit
def _factor(f_smem, INDEX: gl.constexpr):
    return gl.expand_dims(f_smem.index(INDEX).load(gl.SliceLayout(1, L)), 1)


@gluon.jit
def _row_pairs(value):
    """(64, 32) → (32, 32) int16: rows r and r + 8 of sixteen as e4m3. A thread holds both.

    They are stored transposed as 16-bit elements, because stmatrix cannot transpose single bytes.
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
def _slice(
    acc, dz, dz_t, a_t, z_smem, a_smem, f_smem, end, row, column, place,
    GATE_UP: gl.constexpr, BACKWARD: gl.constexpr,
    STORE_DZ: gl.constexpr, STORE_T: gl.constexpr, STORE_A: gl.constexpr,
    BUFFER: gl.constexpr, A_BUFFER: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Store dZ, dZᵀ and A'ᵀ of a slice (64, 32), return acc·A (64, 4): sums of eight columns each.

    `place` is the column of dZᵀ and A'ᵀ that the consumer's rows start at, FIRST the place of its
    first factor.
    """
    HALVES: gl.constexpr = 1 if GATE_UP is None else 2
    # The buffers of Z as twice as many of e4m3: dZ is in the even ones, dZᵀ in the odd ones.
    N: gl.constexpr = 4 * BUFFERS
    wide = _view(z_smem, F8, N, [CONSUMER_M, HALVES * SLICE]).index(2 * BUFFER)
    parts = _view(z_smem, F8, N, [HALVES, CONSUMER_M, SLICE]).index(2 * BUFFER)
    parts_t = _view(z_smem, F8, N, [HALVES, SLICE, CONSUMER_M]).index(2 * BUFFER + 1)
    pairs_t = _view(z_smem, gl.int16, N, [HALVES * SLICE, CONSUMER_M // 2]).index(2 * BUFFER + 1)

    if GATE_UP is None:
        gate = z_smem.index(BUFFER).load(L)
    elif GATE_UP == "concatenated":
        gate, up = z_smem.index(2 * BUFFER).load(L), z_smem.index(2 * BUFFER + 1).load(L)
    else:
        gate, up = pairs(z_smem.index(BUFFER).load(LZ), 2 * SLICE)
        gate = gl.convert_layout(gate, L, assert_trivial=True)
        up = gl.convert_layout(up, L, assert_trivial=True)
    barrier()  # Z has been read: from here on, what is computed can be stored at once
    # The first factor is a power of two, so dS can be multiplied by it after the sum.
    acc = gl.convert_layout(acc, L, assert_trivial=True)
    weighted = acc * (_factor(f_smem, FIRST) * _factor(f_smem, FIRST + 1))
    if GATE_UP is None:
        value, dgate = BACKWARD(gate.to(gl.float32), weighted)
    else:
        value, dgate, dup = BACKWARD(gate.to(gl.float32), up.to(gl.float32), weighted)
    left, right = halves(acc * value)
    left, right = halves(left + right)
    even, odd = pairs(left + right, SLICE // 4)
    if STORE_A:
        pairs_a = _view(a_smem, gl.int16, 4, [SLICE, CONSUMER_M // 2]).index(A_BUFFER)
        pairs_a.permute((1, 0)).store(_row_pairs(value * _factor(f_smem, FIRST + 4)))
    if STORE_DZ:
        factor = _factor(f_smem, FIRST + 2)
        if GATE_UP is None:
            wide.store((dgate * factor).to(F8))
        elif GATE_UP == "concatenated":
            both = gl.join((dgate * factor).to(F8), (dup * factor).to(F8))
            parts.store(gl.permute(both, (2, 0, 1)))
        else:
            both = gl.reshape(gl.join(dgate * factor, dup * factor), (CONSUMER_M, 2 * SLICE))
            wide.store(gl.convert_layout(both, LZ, assert_trivial=True).to(F8))
    if STORE_T:
        factor = _factor(f_smem, FIRST + 3)
        both_t = _row_pairs(dgate * factor)
        if GATE_UP is not None:
            both_t = gl.join(both_t, _row_pairs(dup * factor))
            both_t = gl.reshape(gl.permute(both_t, (0, 2, 1)), (CONSUMER_M // 2, 2 * SLICE))
        pairs_t.permute((1, 0)).store(both_t)
    fence_async_shared()
    if STORE_DZ:
        if GATE_UP == "concatenated":
            box = parts.reshape([1, 1, 2, CONSUMER_M, SLICE])
            copy_out(dz, [ORIGIN, end, 0, ORIGIN - end + row, column], box)
        else:
            box = wide.reshape([1, 1, CONSUMER_M, HALVES * SLICE])
            store_rows(dz, end, row, HALVES * column, box)
    if STORE_T:
        copy_out(dz_t, [0, column, place], parts_t)
    if STORE_A:
        copy_out(a_t, [column, place], a_smem.index(A_BUFFER))
    return gl.convert_layout(even + odd, SUMS, assert_trivial=True)


@gluon.jit
def _place_of(expert, start, row):
    """The column of dZᵀ and A'ᵀ of row `row`; an expert's columns start at a multiple of 128."""
    return (start // TILE_M + expert) * TILE_M + row - start


@gluon.jit
def _consumer(
    factors, rows, z, dz, dz_t, a_t, row_slot, partial, plane, tiles, total,
    do_smem, w_smem, z_smem, a_smem, f_smem, slot_smem, full, empty, z_full,
    CONSUMER: gl.constexpr, H: gl.constexpr, I: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GATE_UP: gl.constexpr, BACKWARD: gl.constexpr,
    STORE_DZ: gl.constexpr, STORE_T: gl.constexpr, STORE_A: gl.constexpr,
    STORE_PARTIAL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    PARTS: gl.constexpr = 2 if GATE_UP == "concatenated" else 1  # boxes of Z in a slice
    ROUNDS: gl.constexpr = BLOCK_N // SLICE // BUFFERS  # how often a tile fills all buffers
    STORES: gl.constexpr = STORE_DZ + STORE_T + STORE_A  # of a slice
    r = gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
    each = gl.arange(0, CONSUMER_M, gl.BlockedLayout([1], [32], [4], [0]))  # a row per thread
    MINE: gl.constexpr = CONSUMER * BUFFERS  # this consumer's first buffer
    step = 0
    filled = 0  # how often all buffers have been filled
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    expert, start, end, number = load_work(tiles, first, total, I, BLOCK_N)
    row, n = rows_of_work(first, start, end, number, H, I, BLOCK_N)
    row += CONSUMER * CONSUMER_M
    place = _place_of(expert, start, row)
    for index in range(first, total, stride):
        expert, start, next_end, number = load_work(tiles, index + stride, total, I, BLOCK_N)
        tma.store_wait(0)
        for s in gl.static_range(BUFFERS):
            load_z(
                z, end, row, n * BLOCK_N + s * SLICE,
                z_full.index(MINE + s), z_smem, (MINE + s) * PARTS, GATE_UP,
            )  # fmt: skip
        mine = row + each
        source = factors + mine
        for i in gl.static_range(FACTORS):
            copy_gathered(f_smem.index(CONSUMER * FACTORS + i), source, mask=mine < end)
            source += rows
        if STORE_PARTIAL and row_slot is not None:
            copy_gathered(slot_smem.index(CONSUMER), row_slot + mine, mask=mine < end)
        async_copy.commit_group()
        acc, step = accumulate(
            step, do_smem, w_smem, full, empty, CONSUMER,
            H, 0, BLOCK_N, BLOCK_K, STAGES, "nk", GATHER,
        )  # fmt: skip
        next_row, next_n = rows_of_work(index + stride, start, next_end, number, H, I, BLOCK_N)
        next_row += CONSUMER * CONSUMER_M
        next_place = _place_of(expert, start, next_row)
        acc = finish(acc, step, empty, STAGES)
        async_copy.wait_group(0)
        ds = gl.zeros((CONSUMER_M, 4), gl.float32, SUMS)
        now, then = acc, acc
        if ROUNDS == 2:
            now, then = halves(acc)
        # Not unrolled, because of the instruction cache: see `dz`.
        for lap in range(ROUNDS):
            parts = quarters(now)
            for i in gl.static_range(BUFFERS):
                column = n * BLOCK_N + (lap * BUFFERS + i) * SLICE
                mbarrier.wait(z_full.index(MINE + i), filled + lap & 1)
                ds += _slice(
                    parts[i], dz, dz_t, a_t, z_smem, a_smem, f_smem, end, row, column, place,
                    GATE_UP, BACKWARD, STORE_DZ, STORE_T, STORE_A,
                    MINE + i, CONSUMER * 2 + i % 2, CONSUMER * FACTORS,
                )  # fmt: skip
                # Only this slice's stores are still in flight: the buffer before it is free and
                # takes a slice of the next lap. The last buffer is filled during that lap.
                tma.store_wait(STORES)
                if lap == 1 if i == 0 else lap + 1 < ROUNDS:
                    load_z(
                        z, end, row, column + (BUFFERS - 1) * SLICE,
                        z_full.index(MINE + (i - 1) % BUFFERS), z_smem,
                        (MINE + (i - 1) % BUFFERS) * PARTS, GATE_UP,
                    )  # fmt: skip
            now = then
        filled += ROUNDS
        if STORE_PARTIAL:
            slot = row + r
            if row_slot is not None:
                slot = slot_smem.index(CONSUMER).load(gl.SliceLayout(1, L))
            sums = gl.convert_layout(gl.sum(ds, 1), gl.SliceLayout(1, L), assert_trivial=True)
            sums *= f_smem.index(CONSUMER * FACTORS).load(gl.SliceLayout(1, L))
            gl.store(partial + n * plane.to(gl.int64) + slot, sums, mask=row + r < end)
        row, end, n, place = next_row, next_end, next_n, next_place
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "plane"])
def hopper_fp8_dz_kernel(
    do8, row_token, w2_t, factors, rows, row_slot, z, dz, dz_t, a_t, partial, plane, tiles,
    H: gl.constexpr, I: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GATE_UP: gl.constexpr, BACKWARD: gl.constexpr,
    STORE_DZ: gl.constexpr, STORE_T: gl.constexpr, STORE_A: gl.constexpr,
    STORE_PARTIAL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """dZ (R, N), dZᵀ (N, P), A'ᵀ (I, P), all e4m3, and partial sums of dS (I/BLOCK_N, plane ≥ S).

    w2_t is W2 as (E, I, H). The factors are (5, R), R = `rows`. GATE_UP is as in
    `triton.gemm.up_kernel`. Rows of dO are gathered if GATHER.

    Grid: one program per SM; each owns the tiles that it writes. The columns of a tile in dZᵀ and
    A'ᵀ past its expert's end become zeros; columns of no tile are not written.
    """
    Z_COLUMNS: gl.constexpr = 2 * SLICE if GATE_UP == "interleaved" else SLICE
    PARTS: gl.constexpr = 2 if GATE_UP == "concatenated" else 1
    do_smem = gl.allocate_shared_memory(
        F8, [2 * STAGES, CONSUMER_M, BLOCK_K], _layout([CONSUMER_M, BLOCK_K], F8)
    )
    w_smem = weight_ring(w2_t, BLOCK_N, BLOCK_K, STAGES, "nk", None)
    z_smem = gl.allocate_shared_memory(
        z.dtype,
        [2 * BUFFERS * PARTS, CONSUMER_M, Z_COLUMNS],
        _layout([CONSUMER_M, Z_COLUMNS], z.dtype),
    )
    a_smem = gl.allocate_shared_memory(F8, [4, SLICE, CONSUMER_M], _layout([SLICE, CONSUMER_M], F8))
    f_smem = gl.allocate_shared_memory(
        gl.float32, [2 * FACTORS, CONSUMER_M], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    slot_smem = gl.allocate_shared_memory(
        gl.int32, [2, CONSUMER_M], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    z_full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    ARRIVALS: gl.constexpr = 129 if GATHER else 1  # TMA, and each of the producer's 128 threads
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(z_full.index(i), count=1)
    total = gl.load(tiles) * ((I + BLOCK_N - 1) // BLOCK_N)
    gl.warp_specialize(
        [
            (_consumer, (
                factors, rows, z, dz, dz_t, a_t, row_slot, partial, plane, tiles, total,
                do_smem, w_smem, z_smem, a_smem, f_smem, slot_smem, full, empty, z_full,
                0, H, I, BLOCK_N, BLOCK_K, STAGES, GATE_UP, BACKWARD,
                STORE_DZ, STORE_T, STORE_A, STORE_PARTIAL, GATHER,
            )),
            (_consumer, (
                factors, rows, z, dz, dz_t, a_t, row_slot, partial, plane, tiles, total,
                do_smem, w_smem, z_smem, a_smem, f_smem, slot_smem, full, empty, z_full,
                1, H, I, BLOCK_N, BLOCK_K, STAGES, GATE_UP, BACKWARD,
                STORE_DZ, STORE_T, STORE_A, STORE_PARTIAL, GATHER,
            )),
            (producer, (
                do8, row_token, w2_t, None, None, tiles, total, do_smem, w_smem, full, empty,
                H, I, 0, BLOCK_N, BLOCK_K, STAGES, "nk", None, GATHER,
            )),
        ],
        [4, 4 if GATHER else 1],
        [232, 40],
    )  # fmt: skip
