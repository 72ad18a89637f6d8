"""The dZ GEMM on Hopper: dA' = dO W2 in the accumulator; the epilogue makes dZ, A' and dS from it.

The main loop is in `ring`. In the epilogue a consumer warpgroup walks over slices of 32 columns. Z
arrives in shared memory by TMA, `BUFFERS` slices ahead, the first of them under the main loop. dZ
overwrites Z there and leaves by TMA; the buffer is free again when that store has been waited for.
Z in e4m3 takes the first half of its buffer, and its scales are loaded under the last wgmma.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from .ragged import load_rows, load_rows_of_half, store_rows, store_rows_of_half
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
    z_buffer,
)

SLICE = gl.constexpr(32)  # columns of A in a slice: 128 bytes of an interleaved row of Z
BUFFERS = gl.constexpr(4)  # slices of Z in flight per consumer warpgroup
# Layout of (64, 8) partial sums of dS: (64, 32) would take twelve registers more.
SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
)


@gluon.jit
def load_z(z, end, row, column, barrier, smem, first, GATE_UP: gl.constexpr):
    """Start the TMA load of one slice of Z: one box, or a gate and an up box if concatenated."""
    PER_COLUMN: gl.constexpr = 1 if GATE_UP is None else 2  # columns of Z per column of A
    mbarrier.expect(barrier, z.dtype.primitive_bitwidth // 8 * CONSUMER_M * PER_COLUMN * SLICE)
    if GATE_UP == "concatenated":
        for half in gl.static_range(2):
            box = z_buffer(z, smem.index(first + half)).reshape([1, 1, CONSUMER_M, 1, SLICE])
            load_rows_of_half(z, end, row, half, column, barrier, box)
    else:
        box = z_buffer(z, smem.index(first)).reshape([1, 1, CONSUMER_M, PER_COLUMN * SLICE])
        load_rows(z, end, row, PER_COLUMN * column, barrier, box)


@gluon.jit
def _in_fp32(z, exponent):
    """Z in fp32, times 2^(exponent − 127) of its row if it is in e4m3."""
    if z.dtype == gl.float8e4nv:
        scale = ((exponent & 0xFF) << 23).to(gl.float32, bitcast=True)
        return z.to(gl.float32) * gl.expand_dims(scale, 1)
    else:
        return z.to(gl.float32)


@gluon.jit
def _exponents(
    z_scale, num_rows, row, r, ok, first, BLOCKS: gl.constexpr, I: gl.constexpr,
    GATE_UP: gl.constexpr,
):  # fmt: skip
    """Exponents of the scales of BLOCKS ≤ 4 blocks of Z, a byte each: four scales would take six
    registers more. Past the last block, where Z is zero, that of the last."""
    BLOCK: gl.constexpr = 128 if GATE_UP is None else 64
    packed = gl.zeros_like(r)
    for b in gl.static_range(BLOCKS):
        block = gl.minimum(first + b, (I + BLOCK - 1) // BLOCK - 1)
        scale = gl.load(z_scale + block * num_rows.to(gl.int64) + row + r, mask=ok, other=0.0)
        packed = packed | (scale.to(gl.int32, bitcast=True) >> 23 << 8 * b)
    return packed


@gluon.jit
def _slice(
    acc, score, exponent, z, dz, a, z_smem, a_smem, end, row, column,
    GATE_UP: gl.constexpr, BACKWARD: gl.constexpr, STORE_A: gl.constexpr,
    z_first, a_first,
):  # fmt: skip
    """Store dZ and A' of a slice (64, 32), return dA'·A (64, 8): sums of four columns each."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SLICE, 16]
    )
    # Layout of interleaved Z: a thread holds the gates and ups of its two columns of A.
    LZ: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 64],
    )  # fmt: skip
    acc = gl.convert_layout(acc, L, assert_trivial=True)
    weight = gl.expand_dims(score, 1)
    first = z_smem.index(z_first)
    source = z_buffer(z, first)
    if GATE_UP is None:
        value, dplain = BACKWARD(_in_fp32(source.load(L), exponent), acc * weight)
        first.store(dplain.to(dz.dtype))
    elif GATE_UP == "concatenated":
        second = z_smem.index(z_first + 1)
        gate, up = source.load(L), z_buffer(z, second).load(L)
        value, dgate, dup = BACKWARD(_in_fp32(gate, exponent), _in_fp32(up, exponent), acc * weight)
        first.store(dgate.to(dz.dtype))
        second.store(dup.to(dz.dtype))
    else:
        gate, up = pairs(source.load(LZ), 2 * SLICE)
        gate = gl.convert_layout(gate, L, assert_trivial=True)
        up = gl.convert_layout(up, L, assert_trivial=True)
        value, dgate, dup = BACKWARD(_in_fp32(gate, exponent), _in_fp32(up, exponent), acc * weight)
        both = gl.reshape(gl.join(dgate.to(dz.dtype), dup.to(dz.dtype)), (CONSUMER_M, 2 * SLICE))
        first.store(gl.convert_layout(both, LZ, assert_trivial=True))
    if STORE_A:
        a_smem.index(a_first).store((value * weight).to(a.dtype))
    fence_async_shared()
    if GATE_UP == "concatenated":
        store_rows_of_half(dz, end, row, 0, column, first.reshape([1, 1, CONSUMER_M, 1, SLICE]))
        store_rows_of_half(dz, end, row, 1, column, second.reshape([1, 1, CONSUMER_M, 1, SLICE]))
    else:
        PER_COLUMN: gl.constexpr = 1 if GATE_UP is None else 2
        box = first.reshape([1, 1, CONSUMER_M, PER_COLUMN * SLICE])
        store_rows(dz, end, row, PER_COLUMN * column, box)
    if STORE_A:
        store_rows(a, end, row, column, a_smem.index(a_first).reshape([1, 1, CONSUMER_M, SLICE]))
    left, right = halves(acc * value)
    left, right = halves(left + right)
    return gl.convert_layout(left + right, SUMS, assert_trivial=True)


@gluon.jit
def _slots(row_slot, row, end, r):
    """Slot of each of 64 rows."""
    if row_slot is None:
        return row + r
    else:
        return gl.load(row_slot + row + r, mask=row + r < end, other=0)


@gluon.jit
def _consumer(
    z, z_scale, num_rows, dz, a, scores, row_slot, partial, plane, tiles, total,
    do_smem, w_smem, z_smem, a_smem, full, empty, z_full,
    CONSUMER: gl.constexpr, H: gl.constexpr, I: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_LAYOUT: gl.constexpr, GATE_UP: gl.constexpr, BACKWARD: gl.constexpr,
    STORE_A: gl.constexpr, STORE_PARTIAL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SLICE, 16]
    )
    PARTS: gl.constexpr = 2 if GATE_UP == "concatenated" else 1  # boxes of Z in a slice
    ROUNDS: gl.constexpr = BLOCK_N // SLICE // BUFFERS  # how often a tile fills all buffers
    STORES: gl.constexpr = PARTS + (1 if STORE_A else 0)
    PER_LAP: gl.constexpr = 1 if GATE_UP is None else 2  # blocks of Z in BUFFERS slices
    r = gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
    MINE: gl.constexpr = CONSUMER * BUFFERS  # this consumer's first buffer
    step = 0
    filled = 0  # how often all buffers have been filled
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    _expert, start, end, number = load_work(tiles, first, total, I, BLOCK_N)
    row, n = rows_of_work(first, start, end, number, H, I, BLOCK_N)
    row += CONSUMER * CONSUMER_M
    slot = _slots(row_slot, row, end, r)
    for index in range(first, total, stride):
        _expert, start, next_end, number = load_work(tiles, index + stride, total, I, BLOCK_N)
        tma.store_wait(0)
        for s in gl.static_range(BUFFERS):
            load_z(
                z, end, row, n * BLOCK_N + s * SLICE,
                z_full.index(MINE + s), z_smem, (MINE + s) * PARTS, GATE_UP,
            )  # fmt: skip
        ok = row + r < end
        if scores is None:
            score = gl.full((CONSUMER_M,), 1.0, gl.float32, gl.SliceLayout(1, L))
        else:
            score = gl.load(scores + slot, mask=ok, other=0.0)
        acc, step = accumulate(
            step, do_smem, w_smem, full, empty, CONSUMER,
            H, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, GATHER,
        )  # fmt: skip
        next_row, next_n = rows_of_work(index + stride, start, next_end, number, H, I, BLOCK_N)
        next_row += CONSUMER * CONSUMER_M
        next_slot = _slots(row_slot, next_row, next_end, r)
        if z_scale is None:
            exponents = r
        else:
            BLOCKS: gl.constexpr = ROUNDS * PER_LAP
            exponents = _exponents(
                z_scale, num_rows, row, r, ok, n * BLOCKS, BLOCKS, I, GATE_UP
            )  # fmt: skip
        acc = finish(acc, step, empty, STAGES)
        ds = gl.zeros((CONSUMER_M, SLICE // 4), gl.float32, SUMS)
        now, then = acc, acc
        if ROUNDS == 2:
            now, then = halves(acc)
        # Not unrolled: eight slices for both warpgroups do not fit the instruction cache. Fetching
        # instructions took 79% of the epilogue of the clamped activation.
        for lap in range(ROUNDS):
            parts = quarters(now)
            for i in gl.static_range(BUFFERS):
                column = n * BLOCK_N + (lap * BUFFERS + i) * SLICE
                mbarrier.wait(z_full.index(MINE + i), filled + lap & 1)
                ds += _slice(
                    parts[i], score, exponents >> 8 * (i * PER_LAP // BUFFERS),
                    z, dz, a, z_smem, a_smem, end, row, column,
                    GATE_UP, BACKWARD, STORE_A, (MINE + i) * PARTS, CONSUMER * 2 + i % 2,
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
            if z_scale is not None:
                exponents = exponents >> 8 * PER_LAP
        filled += ROUNDS
        if STORE_PARTIAL:
            sums = gl.convert_layout(gl.sum(ds, 1), gl.SliceLayout(1, L), assert_trivial=True)
            gl.store(partial + n * plane.to(gl.int64) + slot, sums, mask=ok)
        row, end, n, slot = next_row, next_end, next_n, next_slot
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
    dtype: gl.constexpr = dz.dtype
    Z_COLUMNS: gl.constexpr = 2 * SLICE if GATE_UP == "interleaved" else SLICE
    PARTS: gl.constexpr = 2 if GATE_UP == "concatenated" else 1
    do_smem = gl.allocate_shared_memory(
        dtype,
        [2 * STAGES, CONSUMER_M, BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_M, BLOCK_K], dtype),
    )
    w_smem = weight_ring(w2, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, None)
    z_smem = gl.allocate_shared_memory(
        dtype,
        [2 * BUFFERS * PARTS, CONSUMER_M, Z_COLUMNS],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_M, Z_COLUMNS], dtype),
    )
    a_smem = gl.allocate_shared_memory(
        dtype,
        [4, CONSUMER_M, SLICE],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_M, SLICE], dtype),
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
                z, z_scale, num_rows, dz, a, scores, row_slot, partial, plane, tiles, total,
                do_smem, w_smem, z_smem, a_smem, full, empty, z_full,
                0, H, I, RANK, BLOCK_N, BLOCK_K, STAGES,
                WEIGHT_LAYOUT, GATE_UP, BACKWARD, STORE_A, STORE_PARTIAL, GATHER,
            )),
            (_consumer, (
                z, z_scale, num_rows, dz, a, scores, row_slot, partial, plane, tiles, total,
                do_smem, w_smem, z_smem, a_smem, full, empty, z_full,
                1, H, I, RANK, BLOCK_N, BLOCK_K, STAGES,
                WEIGHT_LAYOUT, GATE_UP, BACKWARD, STORE_A, STORE_PARTIAL, GATHER,
            )),
            (producer, (
                dout, row_token, w2, lora_u, lora_b, tiles, total, do_smem, w_smem, full, empty,
                H, I, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, None, GATHER,
            )),
        ],
        [4, 4 if GATHER else 1],
        [232, 40],
    )  # fmt: skip
