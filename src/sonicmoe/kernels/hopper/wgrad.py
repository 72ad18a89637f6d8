"""Weight gradients on Hopper: one producer warpgroup, two consumer warpgroups.

A tile is (BLOCK_M, BLOCK_N) of one expert's gradient. The producer fills a ring buffer of `STAGES`
blocks of BLOCK_K rows: operands that lie in order by TMA, with zeros past the expert's last row,
gathered ones row by row with cp.async. Each consumer owns half of the tile's M and stores it
through shared memory under the main loop of the next tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..spans import any_is_split, rows_of
from ..tile_order import in_bands
from .epilogue import quarters
from .gluon_compat import copy_gathered, copy_out
from .ragged import load_rows


@gluon.jit
def _load_rows_of(index, expert_start, num_experts, per_group):
    """First and end row of the expert of work item `index`; zeros if the item is a span."""
    group = index // per_group
    start = gl.load(expert_start + group, mask=group < num_experts, other=0)
    end = gl.load(expert_start + group + 1, mask=group < num_experts, other=0)
    return start, end


@gluon.jit
def _rows_of(
    index, start, end, expert_start, num_experts, span, per_group, total, SPLIT: gl.constexpr
):
    """First and end row that work item `index` sums over, from the values of `_load_rows_of`.

    Called one tile after that, since the first use of a value waits for its load.
    """
    if SPLIT and index < total:
        _, start, end = rows_of(index // per_group, start, end, expert_start, num_experts, span)
    return start, end


@gluon.jit
def _gather(
    smem, source, token, ok, column,
    COLUMNS: gl.constexpr, BLOCK_C: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Start the copy of BLOCK_C columns of the tokens' rows; zeros where not `ok`."""
    c = column + gl.arange(0, BLOCK_C, gl.SliceLayout(0, L))
    ptr = source + gl.expand_dims(token.to(gl.int64) * COLUMNS, 1) + gl.expand_dims(c, 0)
    copy_gathered(smem, ptr, mask=gl.expand_dims(ok, 1) & gl.expand_dims(c < COLUMNS, 0))


@gluon.jit
def _producer(
    left, right, row_token, expert_start, num_experts, span, total,
    m_tiles: gl.constexpr, n_tiles: gl.constexpr,
    left_smem, right_smem, full, empty,
    SPLIT: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GATHER_LEFT: gl.constexpr, GATHER_RIGHT: gl.constexpr,
):  # fmt: skip
    CONSUMER_M: gl.constexpr = BLOCK_M // 2
    GATHERED: gl.constexpr = CONSUMER_M if GATHER_LEFT else BLOCK_N
    L: gl.constexpr = gl.BlockedLayout(
        [1, 8],
        [32 // (min(GATHERED, 256) // 8), min(GATHERED, 256) // 8],
        [gl.num_warps(), 1],
        [1, 0],
    )
    GATHER: gl.constexpr = GATHER_LEFT or GATHER_RIGHT
    BYTES: gl.constexpr = (
        2 * BLOCK_K * ((0 if GATHER_LEFT else BLOCK_M) + (0 if GATHER_RIGHT else BLOCK_N))
    )
    r = gl.arange(0, BLOCK_K, gl.SliceLayout(1, L))
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    per_group = m_tiles * n_tiles
    start, end = _load_rows_of(first, expert_start, num_experts, per_group)
    next_start, next_end = _load_rows_of(first + stride, expert_start, num_experts, per_group)
    start, end = _rows_of(
        first, start, end, expert_start, num_experts, span, per_group, total, SPLIT
    )
    next_start, next_end = _rows_of(
        first + stride, next_start, next_end, expert_start, num_experts, span, per_group, total,
        SPLIT,
    )  # fmt: skip
    if GATHER:
        token = gl.load(row_token + start + r, mask=start + r < end, other=0)
    step = 0
    for index in range(first, total, stride):
        m, n = in_bands(index % per_group, m_tiles, n_tiles, BLOCK_M, BLOCK_N)
        m0 = m * BLOCK_M
        n0 = n * BLOCK_N
        later = index + 2 * stride
        later_start, later_end = _load_rows_of(later, expert_start, num_experts, per_group)
        if GATHER:
            first_token = gl.load(
                row_token + next_start + r, mask=next_start + r < next_end, other=0
            )
        # Counted from zero: if the carried `start` is only the bound of an inner loop, Triton 3.6
        # uses its first value for all tiles, and the consumers deadlock.
        for block in range(gl.cdiv(end - start, BLOCK_K)):
            k = start + block * BLOCK_K
            slot = step % STAGES
            if GATHER:
                # Load the next block's tokens while this block waits for its ring slot.
                token_next = gl.load(
                    row_token + k + BLOCK_K + r, mask=k + BLOCK_K + r < end, other=0
                )
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            ok = k + r < end
            half = left_smem.index(2 * slot + 1)
            if GATHER_LEFT:
                _gather(left_smem.index(2 * slot), left, token, ok, m0, M, CONSUMER_M, L)
                _gather(half, left, token, ok, m0 + CONSUMER_M, M, CONSUMER_M, L)
            else:
                load_rows(left, end, k, m0, full.index(slot), left_smem.index(2 * slot))
                load_rows(left, end, k, m0 + CONSUMER_M, full.index(slot), half)
            if GATHER_RIGHT:
                _gather(right_smem.index(slot), right, token, ok, n0, N, BLOCK_N, L)
            else:
                load_rows(right, end, k, n0, full.index(slot), right_smem.index(slot))
            if GATHER:
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                token = token_next
            step += 1
        if GATHER:
            token = first_token
        start, end = next_start, next_end
        next_start, next_end = _rows_of(
            later, later_start, later_end, expert_start, num_experts, span, per_group, total, SPLIT
        )
    if GATHER:
        async_copy.wait_group(0)


@gluon.jit
def _write(
    buffer, piece, plane, m0, n0,
    M: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Store (ROWS, COLUMNS) in fp32, or add it if ADD: no two programs write the same element."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    m = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    n = n0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    row = (plane.to(gl.int64) * M + m) * N
    ptr = buffer + gl.expand_dims(row, 1) + gl.expand_dims(n, 0)
    inside = gl.expand_dims(m < M, 1) & gl.expand_dims(n < N, 0)
    value = gl.convert_layout(piece, L, assert_trivial=True)
    if ADD:
        gl.atomic_add(ptr, value, mask=inside, sem="relaxed")
    else:
        gl.store(ptr, value, mask=inside)


@gluon.jit
def _store(
    out, out_fp32, pieces, expert, m0, n0, out_smem, any_row,
    CONSUMER: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    CONSUMER_M: gl.constexpr, BLOCK_N: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Store a consumer's half of the tile in quarters: by TMA, or in fp32 without it."""
    PIECE: gl.constexpr = BLOCK_N // 4
    for i in gl.static_range(4):
        column = n0 + i * PIECE
        if out_fp32 is not None:
            if not ADD:
                _write(out_fp32, pieces[i], expert, m0, column, M, N, CONSUMER_M, PIECE, False)
            elif any_row:
                _write(out_fp32, pieces[i], expert, m0, column, M, N, CONSUMER_M, PIECE, True)
        else:
            tma.store_wait(1)  # the last store from this buffer, two pieces ago, is done
            staged = out_smem.index(2 * CONSUMER + i % 2)
            staged.reshape([CONSUMER_M, PIECE]).store(pieces[i].to(out.dtype))
            fence_async_shared()
            copy_out(out, [expert, m0, column], staged)


@gluon.jit
def _consumer(
    out, out_fp32, partial, expert_start, num_experts, span, total,
    m_tiles: gl.constexpr, n_tiles: gl.constexpr,
    left_smem, right_smem, out_smem, full, empty,
    CONSUMER: gl.constexpr, SPLIT: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GATHER: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    CONSUMER_M: gl.constexpr = BLOCK_M // 2
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    per_group = m_tiles * n_tiles
    start, end = _load_rows_of(first, expert_start, num_experts, per_group)
    start, end = _rows_of(
        first, start, end, expert_start, num_experts, span, per_group, total, SPLIT
    )
    step = 0
    for index in range(first, total, stride):
        m, n = in_bands(index % per_group, m_tiles, n_tiles, BLOCK_M, BLOCK_N)
        m0 = m * BLOCK_M + CONSUMER * CONSUMER_M
        n0 = n * BLOCK_N
        following = index + stride
        next_start, next_end = _load_rows_of(following, expert_start, num_experts, per_group)
        acc = gl.zeros((CONSUMER_M, BLOCK_N), gl.float32, L)
        for k in range(start, end, BLOCK_K):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            if GATHER:
                fence_async_shared()  # gathered rows were written by cp.async, not by TMA
            a = left_smem.index(2 * slot + CONSUMER).reshape([BLOCK_K, CONSUMER_M]).permute((1, 0))
            b = right_smem.index(slot).reshape([BLOCK_K, BLOCK_N])
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > start)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=end > start)
        pieces = quarters(acc)
        group = index // per_group
        if SPLIT and group >= num_experts:
            if end >= 0:
                place = group - num_experts
                for i in gl.static_range(4):
                    column = n0 + i * (BLOCK_N // 4)
                    _write(
                        partial, pieces[i], place, m0, column, M, N, CONSUMER_M, BLOCK_N // 4, False
                    )
        elif end >= 0:
            _store(
                out,
                out_fp32,
                pieces,
                group,
                m0,
                n0,
                out_smem,
                end > start,
                CONSUMER,
                M,
                N,
                CONSUMER_M,
                BLOCK_N,
                ADD,
            )
        start, end = _rows_of(
            following, next_start, next_end, expert_start, num_experts, span, per_group, total,
            SPLIT,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["span", "places"])
def hopper_wgrad_kernel(
    left, right, row_token, out, out_fp32, partial, expert_start, tiles, num_experts, span, places,
    M: gl.constexpr, N: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GATHER_LEFT: gl.constexpr, GATHER_RIGHT: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """out[e] (M, N) = Σ_r left[r, :]ᵀ right[r, :] over the rows of expert e.

    At most one operand is gathered. Instead of `out`, `out_fp32` (E, M, N) may be given, to which
    the sums are added if ADD. `partial` is as in `triton.wgrad.wgrad_kernel`.

    Grid: one program per SM; each walks over (expert or span, M-tile, N-tile) and owns the tiles
    that it writes.
    """
    CONSUMER_M: gl.constexpr = BLOCK_M // 2
    dtype: gl.constexpr = right.dtype if GATHER_LEFT else left.dtype
    m_tiles: gl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    n_tiles: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if GATHER_LEFT:
        left_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_K, CONSUMER_M], PLAIN)
    else:
        left_smem = gl.allocate_shared_memory(
            dtype, [2 * STAGES, 1, 1, BLOCK_K, CONSUMER_M], left.layout
        )
    if GATHER_RIGHT:
        right_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], PLAIN)
    else:
        right_smem = gl.allocate_shared_memory(
            dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_N], right.layout
        )
    if out_fp32 is None:
        out_smem = gl.allocate_shared_memory(dtype, [4, 1, CONSUMER_M, BLOCK_N // 4], out.layout)
    else:
        out_smem = left_smem  # not used
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    GATHER: gl.constexpr = GATHER_LEFT or GATHER_RIGHT
    ARRIVALS: gl.constexpr = 129 if GATHER else 1  # TMA, and each of the producer's 128 threads
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)
    SPLIT: gl.constexpr = partial is not None
    groups = num_experts
    if SPLIT:
        groups += gl.where(any_is_split(tiles, span), places, 0)
    total = groups * m_tiles * n_tiles
    gl.warp_specialize(
        [
            (_consumer, (
                out, out_fp32, partial, expert_start, num_experts, span, total, m_tiles, n_tiles,
                left_smem, right_smem, out_smem, full, empty,
                0, SPLIT, M, N, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GATHER, ADD,
            )),
            (_consumer, (
                out, out_fp32, partial, expert_start, num_experts, span, total, m_tiles, n_tiles,
                left_smem, right_smem, out_smem, full, empty,
                1, SPLIT, M, N, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GATHER, ADD,
            )),
            (_producer, (
                left, right, row_token, expert_start, num_experts, span, total, m_tiles, n_tiles,
                left_smem, right_smem, full, empty,
                SPLIT, M, N, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GATHER_LEFT, GATHER_RIGHT,
            )),
        ],
        [4, 4 if GATHER else 1],
        [216, 72],
    )  # fmt: skip
