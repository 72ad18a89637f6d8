"""dZ, A' and the score gradient on Hopper: the product dA' = dO W2 with its epilogue in slices.

The ring and the warpgroups are those of `hopper_rows`. In the epilogue a computing warpgroup walks
over slices of 32 columns: Z arrives in shared memory by the copy engine, `BUFFERS` slices ahead and
the first ones under the product; dZ replaces Z there and leaves the same way, and the wait for that
makes the buffer free again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from .hopper_rows import (
    ROWS,
    accumulate,
    halves,
    pairs,
    producer,
    quarters,
    tile_of,
    weight_ring,
)
from .ragged import load_rows, load_rows_of_half, store_rows, store_rows_of_half

SLICE = gl.constexpr(32)  # columns of A in a slice: 128 bytes of interleaved Z a row
BUFFERS = gl.constexpr(4)  # slices of Z on their way at once, for each computing warpgroup


@gluon.jit
def _load_z(z, end, row, column, barrier, smem, first, CONCATENATED: gl.constexpr):
    """One slice of Z: gates and ups side by side, or the two halves."""
    mbarrier.expect(barrier, 2 * ROWS * 2 * SLICE)
    if CONCATENATED:
        for half in gl.static_range(2):
            box = smem.index(first + half).reshape([1, 1, ROWS, 1, SLICE])
            load_rows_of_half(z, end, row, half, column, barrier, box)
    else:
        box = smem.index(first).reshape([1, 1, ROWS, 2 * SLICE])
        load_rows(z, end, row, 2 * column, barrier, box)


@gluon.jit
def _slice(
    acc, score, dz, a, z_smem, a_smem, end, row, column,
    CONCATENATED: gl.constexpr, BACKWARD: gl.constexpr, STORE_A: gl.constexpr, z_first, a_first,
):  # fmt: skip
    """Epilogue of (64, 32): stores dZ and A', returns dA'·A elementwise."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SLICE, 16]
    )
    # Interleaved: the four neighbours that hold gate and up of a thread's two columns.
    LZ: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 64],
    )  # fmt: skip
    acc = gl.convert_layout(acc, L, assert_trivial=True)
    if CONCATENATED:
        gate = z_smem.index(z_first).load(L)
        up = z_smem.index(z_first + 1).load(L)
    else:
        gate, up = pairs(z_smem.index(z_first).load(LZ), 2 * SLICE)
        gate = gl.convert_layout(gate, L, assert_trivial=True)
        up = gl.convert_layout(up, L, assert_trivial=True)
    weight = gl.expand_dims(score, 1)
    value, dgate, dup = BACKWARD(gate.to(gl.float32), up.to(gl.float32), acc * weight)
    if CONCATENATED:
        z_smem.index(z_first).store(dgate.to(dz.dtype))
        z_smem.index(z_first + 1).store(dup.to(dz.dtype))
    else:
        both = gl.reshape(gl.join(dgate.to(dz.dtype), dup.to(dz.dtype)), (ROWS, 2 * SLICE))
        z_smem.index(z_first).store(gl.convert_layout(both, LZ, assert_trivial=True))
    if STORE_A:
        a_smem.index(a_first).store((value * weight).to(a.dtype))
    fence_async_shared()
    if CONCATENATED:
        store_rows_of_half(
            dz, end, row, 0, column, z_smem.index(z_first).reshape([1, 1, ROWS, 1, SLICE])
        )
        store_rows_of_half(
            dz, end, row, 1, column, z_smem.index(z_first + 1).reshape([1, 1, ROWS, 1, SLICE])
        )
    else:
        store_rows(dz, end, row, 2 * column, z_smem.index(z_first).reshape([1, 1, ROWS, 2 * SLICE]))
    if STORE_A:
        store_rows(a, end, row, column, a_smem.index(a_first).reshape([1, 1, ROWS, SLICE]))
    return acc * value


@gluon.jit
def _slots(row_slot, row, end, r):
    if row_slot is None:
        return row + r
    else:
        return gl.load(row_slot + row + r, mask=row + r < end, other=0)


@gluon.jit
def _consumer(
    z, dz, a, scores, row_slot, partial, plane, tiles, total, n_tiles,
    do_smem, w_smem, z_smem, a_smem, full, empty, z_full,
    WHICH: gl.constexpr, H: gl.constexpr, I: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, KN: gl.constexpr, CONCATENATED: gl.constexpr, BACKWARD: gl.constexpr,
    STORE_A: gl.constexpr, STORE_PARTIAL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SLICE, 16]
    )
    PARTS: gl.constexpr = 2 if CONCATENATED else 1
    SLICES: gl.constexpr = BN // SLICE
    STORES: gl.constexpr = PARTS + (1 if STORE_A else 0)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    MINE: gl.constexpr = WHICH * BUFFERS  # of the buffers
    step = 0
    z_round = 0  # how often the buffers were filled; a tile fills them all, SLICES // BUFFERS times
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    _expert, row, end = tile_of(tiles, first, total, n_tiles)
    _expert, next_row, next_end = tile_of(tiles, first + stride, total, n_tiles)
    row += WHICH * ROWS
    slot = _slots(row_slot, row, end, r)
    for index in range(first, total, stride):
        n = index % n_tiles
        next_row += WHICH * ROWS
        next_slot = _slots(row_slot, next_row, next_end, r)
        tma.store_wait(0)
        for s in gl.static_range(BUFFERS):
            _load_z(
                z, end, row, n * BN + s * SLICE, z_full.index(MINE + s), z_smem, (MINE + s) * PARTS,
                CONCATENATED,
            )  # fmt: skip
        ok = row + r < end
        if scores is None:
            score = gl.full((ROWS,), 1.0, gl.float32, gl.SliceLayout(1, L))
        else:
            score = gl.load(scores + slot, mask=ok, other=0.0)
        acc, step = accumulate(
            step, do_smem, w_smem, full, empty, WHICH, H, BN, BK, STAGES, KN, GATHER
        )
        _expert, later_row, later_end = tile_of(tiles, index + 2 * stride, total, n_tiles)
        if BN == 256:
            left, right = halves(acc)
            s0, s1, s2, s3 = quarters(left)
            s4, s5, s6, s7 = quarters(right)
            parts = (s0, s1, s2, s3, s4, s5, s6, s7)
        else:
            parts = quarters(acc)
        ds = gl.zeros((ROWS, SLICE), gl.float32, L)
        for s in gl.static_range(SLICES):
            mbarrier.wait(z_full.index(MINE + s % BUFFERS), z_round + s // BUFFERS & 1)
            ds += _slice(
                parts[s], score, dz, a, z_smem, a_smem, end, row, n * BN + s * SLICE,
                CONCATENATED, BACKWARD, STORE_A,
                (MINE + s % BUFFERS) * PARTS, WHICH * 2 + s % 2,
            )  # fmt: skip
            if s >= 1:
                # All but this slice's stores have been read: the buffer before it is free.
                tma.store_wait(STORES)
                if s - 1 + BUFFERS < SLICES:
                    _load_z(
                        z, end, row, n * BN + (s - 1 + BUFFERS) * SLICE,
                        z_full.index(MINE + (s - 1) % BUFFERS), z_smem,
                        (MINE + (s - 1) % BUFFERS) * PARTS, CONCATENATED,
                    )  # fmt: skip
        z_round += SLICES // BUFFERS
        if STORE_PARTIAL:
            gl.store(partial + n * plane.to(gl.int64) + slot, gl.sum(ds, 1), mask=ok)
        row, end, slot = next_row, next_end, next_slot
        next_row, next_end = later_row, later_end
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["plane"])
def hopper_score_gradient_kernel(
    dout, row_token, w2, scores, row_slot, z, dz, a, partial, plane, tiles,
    H: gl.constexpr, I: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    KN: gl.constexpr, CONCATENATED: gl.constexpr, BACKWARD: gl.constexpr,
    STORE_A: gl.constexpr, STORE_PARTIAL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """dZ (R, 2I), A' (R, I), partial (I/BN, plane ≥ S). Grid: one program a multiprocessor."""
    n_tiles: gl.constexpr = (I + BN - 1) // BN
    dtype: gl.constexpr = z.dtype
    ZC: gl.constexpr = SLICE if CONCATENATED else 2 * SLICE
    PARTS: gl.constexpr = 2 if CONCATENATED else 1
    do_smem = gl.allocate_shared_memory(
        dtype, [2 * STAGES, ROWS, BK], gl.NVMMASharedLayout.get_default_for([ROWS, BK], dtype)
    )
    w_smem = weight_ring(w2, BN, BK, STAGES, False)
    z_smem = gl.allocate_shared_memory(
        dtype,
        [2 * BUFFERS * PARTS, ROWS, ZC],
        gl.NVMMASharedLayout.get_default_for([ROWS, ZC], dtype),
    )
    a_smem = gl.allocate_shared_memory(
        dtype, [4, ROWS, SLICE], gl.NVMMASharedLayout.get_default_for([ROWS, SLICE], dtype)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    z_full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    ARRIVALS: gl.constexpr = 129 if GATHER else 1
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(z_full.index(i), count=1)
    total = gl.load(tiles) * n_tiles
    gl.warp_specialize(
        [
            (_consumer, (
                z, dz, a, scores, row_slot, partial, plane, tiles, total, n_tiles,
                do_smem, w_smem, z_smem, a_smem, full, empty, z_full,
                0, H, I, BN, BK, STAGES, KN, CONCATENATED, BACKWARD, STORE_A, STORE_PARTIAL,
                GATHER,
            )),
            (_consumer, (
                z, dz, a, scores, row_slot, partial, plane, tiles, total, n_tiles,
                do_smem, w_smem, z_smem, a_smem, full, empty, z_full,
                1, H, I, BN, BK, STAGES, KN, CONCATENATED, BACKWARD, STORE_A, STORE_PARTIAL,
                GATHER,
            )),
            (producer, (
                dout, row_token, w2, tiles, total, n_tiles,
                do_smem, w_smem, full, empty,
                H, BN, BK, STAGES, KN, False, GATHER,
            )),
        ],
        [4, 4 if GATHER else 1],
        [224, 56],
    )  # fmt: skip
