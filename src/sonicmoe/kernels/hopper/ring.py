"""The main loop of the Hopper GEMMs over rows: one producer warpgroup, two consumer warpgroups.

A tile is 128 rows by BLOCK_N columns. The producer fills a ring buffer of `STAGES` blocks of
BLOCK_K: weights by TMA, rows by TMA if they lie in order, else gathered row by row with cp.async.
Each consumer owns 64 rows of the tile and stores them through shared memory. The entry of a tile in
the tile table is loaded long before it is used: that load takes as long as one step of the loop.

With a LoRA adapter, U (R, r) and B (E, N, r) in the layout of the weights, the producer appends
blocks of U and B to those of A and W. The consumers only see more steps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..tile_order import load_tile, place_of
from .gluon_compat import copy_gathered, copy_in, reinterpreted
from .ragged import load_rows, store_rows

CONSUMER_M = gl.constexpr(64)  # rows of one consumer warpgroup: the M of wgmma


@gluon.constexpr_function
def accumulator_layout(columns, dtype):
    """Layout of a consumer's (64, columns) accumulator: a wgmma takes 32 bytes of K."""
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, columns, 256 // dtype.primitive_bitwidth],
    )


@gluon.jit
def load_work(tiles, index, total, N: gl.constexpr, BLOCK_N: gl.constexpr):
    """The tile table's entry for work item `index`; past the last item its header, with end row 0.

    Called well before `rows_of_work`, which waits for the load.
    """
    n_tiles: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    return load_tile(tiles, gl.where(index < total, index // n_tiles, -1))


@gluon.jit
def rows_of_work(
    index, start, end, number, K: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr
):
    """First row and N-tile of work item `index`; past the last item the row is not below `end`."""
    return place_of(index, start, end, number, K, N, 2 * CONSUMER_M, BLOCK_N)


@gluon.jit
def weight_ring(
    w, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_LAYOUT: gl.constexpr, GATE_UP: gl.constexpr,
):  # fmt: skip
    """Shared memory for STAGES blocks of the weights."""
    if WEIGHT_LAYOUT == "kn" and GATE_UP == "concatenated":
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_N], w.dtype)
        ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_K, BLOCK_N], layout)
    else:
        ring = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)
    return ring


@gluon.jit
def _load_weights(
    w, expert, column, k, barrier, smem, slot,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_LAYOUT: gl.constexpr, GATE_UP: gl.constexpr,
):  # fmt: skip
    """Start the TMA load of the weights' block at (column, k) into ring slot `slot`.

    For concatenated gate/up weights `column` is that of the first gate; its ups come with it.
    """
    if WEIGHT_LAYOUT == "kn" and GATE_UP == "concatenated":
        # Columns lie in panels of 64, so gates and ups next to each other are one tile.
        shape: gl.constexpr = [2 * STAGES, 1, BLOCK_K, 1, BLOCK_N // 2]
        layout: gl.constexpr = w.layout
        half = reinterpreted(smem, w.dtype, shape, layout)
        copy_in(w, [expert, k, 0, column], barrier, half.index(2 * slot))
        copy_in(w, [expert, k, 1, column], barrier, half.index(2 * slot + 1))
    elif WEIGHT_LAYOUT == "kn":
        copy_in(w, [expert, k, column], barrier, smem.index(slot))
    elif GATE_UP == "concatenated":
        copy_in(w, [expert, 0, column, k], barrier, smem.index(slot))
    else:
        copy_in(w, [expert, column, k], barrier, smem.index(slot))


@gluon.jit
def _tokens(row_token, row, end, r):
    """Token of each of 64 rows; −1 past the expert's end."""
    return gl.load(row_token + row + r, mask=row + r < end, other=-1)


@gluon.jit
def _load_both(a, end, row, k, barrier, smem, slot, BLOCK_K: gl.constexpr):
    """Start the TMA loads of both consumers' rows, which lie in order."""
    for half in gl.static_range(2):
        box = smem.index(2 * slot + half).reshape([1, 1, CONSUMER_M, BLOCK_K])
        load_rows(a, end, row + half * CONSUMER_M, k, barrier, box)


@gluon.jit
def producer(
    a, row_token, w, lora_u, lora_b, tiles, total, a_smem, w_smem, full, empty,
    K: gl.constexpr, N: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_LAYOUT: gl.constexpr, GATE_UP: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """The producer warpgroup: fill the ring buffer for all tiles of this program.

    Rows past an expert's end are zeros: zeros draw less power, and power is the limit. With other
    rows there the layer takes 2.4% longer at 32768,2048,512,512,10.
    """
    SIZE: gl.constexpr = a_smem.dtype.primitive_bitwidth // 8
    VECTOR: gl.constexpr = 16 // SIZE  # elements that a thread copies at once
    L: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [32 // (BLOCK_K // VECTOR), BLOCK_K // VECTOR], [gl.num_warps(), 1], [1, 0]
    )
    IN_ORDER: gl.constexpr = SIZE * BLOCK_K * (BLOCK_N + 2 * CONSUMER_M)  # bytes of a block
    BYTES: gl.constexpr = SIZE * BLOCK_K * BLOCK_N if GATHER else IN_ORDER
    offs_k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, L))
    r = gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    expert, start, end, number = load_work(tiles, first, total, N, BLOCK_N)
    second = first + stride
    next_expert, next_start, next_end, next_number = load_work(tiles, second, total, N, BLOCK_N)
    row, n = rows_of_work(first, start, end, number, K, N, BLOCK_N)
    next_row, next_n = rows_of_work(second, next_start, next_end, next_number, K, N, BLOCK_N)
    if GATHER:
        upper = _tokens(row_token, row, end, r)
        lower = _tokens(row_token, row + CONSUMER_M, end, r)
    step = 0
    for index in range(first, total, stride):
        column = n * (BLOCK_N // 2) if GATE_UP == "concatenated" else n * BLOCK_N
        later = index + 2 * stride
        later_expert, start, later_end, number = load_work(tiles, later, total, N, BLOCK_N)
        if GATHER:
            upper_ptr = a + gl.expand_dims(upper.to(gl.int64) * K, 1) + gl.expand_dims(offs_k, 0)
            lower_ptr = a + gl.expand_dims(lower.to(gl.int64) * K, 1) + gl.expand_dims(offs_k, 0)
            upper_ok = gl.expand_dims(upper >= 0, 1)
            lower_ok = gl.expand_dims(lower >= 0, 1)
            upper = _tokens(row_token, next_row, next_end, r)
            lower = _tokens(row_token, next_row + CONSUMER_M, next_end, r)
        for k in range(0, K, BLOCK_K):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            _load_weights(
                w, expert, column, k, full.index(slot), w_smem, slot,
                BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, GATE_UP,
            )  # fmt: skip
            if GATHER:
                inside = gl.expand_dims(k + offs_k < K, 0) if K % BLOCK_K else True
                copy_gathered(a_smem.index(2 * slot), upper_ptr + k, mask=upper_ok & inside)
                copy_gathered(a_smem.index(2 * slot + 1), lower_ptr + k, mask=lower_ok & inside)
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            else:
                _load_both(a, end, row, k, full.index(slot), a_smem, slot, BLOCK_K)
            step += 1
        if RANK:
            for k in range(0, RANK, BLOCK_K):
                slot = step % STAGES
                mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(slot), IN_ORDER)
                _load_weights(
                    lora_b, expert, column, k, full.index(slot), w_smem, slot,
                    BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, GATE_UP,
                )  # fmt: skip
                _load_both(lora_u, end, row, k, full.index(slot), a_smem, slot, BLOCK_K)
                if GATHER:
                    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                step += 1
        expert, row, end, n = next_expert, next_row, next_end, next_n
        next_expert, next_end = later_expert, later_end
        next_row, next_n = rows_of_work(later, start, next_end, number, K, N, BLOCK_N)
    if GATHER:
        async_copy.wait_group(0)


@gluon.jit
def accumulate(
    step, a_smem, w_smem, full, empty, CONSUMER: gl.constexpr,
    K: gl.constexpr, RANK: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, WEIGHT_LAYOUT: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """The (64, BLOCK_N) accumulator of this consumer's next tile, and the ring step after it.

    The last wgmma is still in flight; `finish` waits for it. In between, the caller looks up where
    the tile lies.
    """
    L: gl.constexpr = accumulator_layout(BLOCK_N, a_smem.dtype)
    acc = gl.zeros((CONSUMER_M, BLOCK_N), gl.float32, L)
    BLOCKS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K + (RANK + BLOCK_K - 1) // BLOCK_K
    for k in range(0, BLOCKS * BLOCK_K, BLOCK_K):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        if GATHER:
            fence_async_shared()  # gathered rows were written by cp.async, not by TMA
        if WEIGHT_LAYOUT == "kn":
            w = w_smem.index(slot).reshape([BLOCK_K, BLOCK_N])
        else:
            w = w_smem.index(slot).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
        acc = warpgroup_mma(a_smem.index(2 * slot + CONSUMER), w, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    return acc, step


@gluon.jit
def finish(acc, step, empty, STAGES: gl.constexpr):
    """Wait for the last wgmma of a tile and release its ring slot."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def next_tile(
    step, index, tiles, total, a_smem, w_smem, full, empty, CONSUMER: gl.constexpr,
    K: gl.constexpr, N: gl.constexpr, RANK: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WEIGHT_LAYOUT: gl.constexpr,
    GATHER: gl.constexpr,
):  # fmt: skip
    """This consumer's accumulator of work item `index`, the ring step after it, and where the tile
    lies: expert, the expert's end row, the consumer's first row, N-tile."""
    expert, start, end, number = load_work(tiles, index, total, N, BLOCK_N)
    acc, step = accumulate(
        step, a_smem, w_smem, full, empty, CONSUMER,
        K, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, GATHER,
    )  # fmt: skip
    row, n = rows_of_work(index, start, end, number, K, N, BLOCK_N)
    acc = finish(acc, step, empty, STAGES)
    return acc, step, expert, end, row + CONSUMER * CONSUMER_M, n


@gluon.jit
def halves(x):
    """Left and right half of the columns."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))


@gluon.jit
def quarters(x):
    """Four quarters of the columns, from left to right."""
    left, right = halves(x)
    q0, q1 = halves(left)
    q2, q3 = halves(right)
    return q0, q1, q2, q3


@gluon.jit
def pairs(x, COLUMNS: gl.constexpr):
    """Even and odd columns."""
    return gl.split(gl.reshape(x, (CONSUMER_M, COLUMNS // 2, 2)))


@gluon.jit
def z_buffer(z, smem):
    """Where a box of Z lies in a buffer for 16-bit data: in its first half if Z is in e4m3."""
    if z.dtype == smem.dtype:
        return smem
    else:
        HALVES: gl.constexpr = [2] + z.block_shape
        LAYOUT: gl.constexpr = z.layout
        both = reinterpreted(smem, z.dtype, HALVES, LAYOUT)
        return both.index(0).reshape([CONSUMER_M, smem.shape[1]])


@gluon.jit
def stage_and_store(value, out, end, row, column, smem, COLUMNS: gl.constexpr):
    """Store (64, COLUMNS) through shared memory to rows from `row` on, up to the expert's `end`."""
    smem.store(value)
    fence_async_shared()
    store_rows(out, end, row, column, smem.reshape([1, 1, CONSUMER_M, COLUMNS]))
