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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..spans import any_is_split, rows_of
from ..tile_order import in_bands
from .epilogue import quarters
from .gluon_compat import aggregate, copy_gathered, copy_out
from .ragged import load_rows
from .ring import Stages, accumulator_layout, assume_layout, ceil_div, make_stages

PRODUCER_REGISTERS = gl.constexpr(72)


@aggregate
class Rows:
    """The rows that a work item sums over; end row -1 if there is nothing to do."""

    expert: gl.tensor
    start: gl.tensor
    end: gl.tensor


@aggregate
class Work:
    """The work items of a weight gradient (E, M, N): all tiles of every expert, then of every span.

    The tiles of an expert or of a span are a group.
    """

    expert_start: gl.tensor
    num_experts: gl.tensor | gl.constexpr
    span: gl.tensor
    total: gl.tensor | gl.constexpr
    SPLIT: gl.constexpr  # whether there are spans
    M: gl.constexpr
    N: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    M_TILES: gl.constexpr
    N_TILES: gl.constexpr

    @gluon.jit
    def group(self, index):
        """The group of work item `index`: an expert, or num_experts + the place of a span."""
        return index // (self.M_TILES * self.N_TILES)

    @gluon.jit
    def tile(self, index):
        """M-tile and N-tile of work item `index`."""
        in_group = index % (self.M_TILES * self.N_TILES)
        return in_bands(in_group, self.M_TILES, self.N_TILES, self.BLOCK_M, self.BLOCK_N)

    @gluon.jit
    def load_entry(self, index):
        """First and end row of the expert of work item `index`; zeros if the item is a span.

        Called well before `locate`, which waits for the load.
        """
        group = self.group(index)
        start = gl.load(self.expert_start + group, mask=group < self.num_experts, other=0)
        end = gl.load(self.expert_start + group + 1, mask=group < self.num_experts, other=0)
        return start, end

    @gluon.jit
    def locate(self, index, entry):
        """The rows of work item `index`."""
        expert = self.group(index)
        start, end = entry
        if self.SPLIT and index < self.total:
            expert, start, end = rows_of(
                expert, start, end, self.expert_start, self.num_experts, self.span
            )
        return Rows(expert=expert, start=start, end=end)

    @gluon.jit
    def first(self):
        """The rows of the first work item of this program."""
        first = gl.program_id(0)
        return self.locate(first, self.load_entry(first))

    @gluon.jit
    def first_two(self):
        """The rows of the first two work items: where a producer's look-ahead starts."""
        first = gl.program_id(0)
        entry = self.load_entry(first)
        second = first + gl.num_programs(0)
        next_entry = self.load_entry(second)
        return self.locate(first, entry), self.locate(second, next_entry)


@gluon.jit
def make_work(
    expert_start, tiles, num_experts, span, places, SPLIT: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The work items; spans only if an expert is long enough to be split."""
    M_TILES: gl.constexpr = ceil_div(M, BLOCK_M)
    N_TILES: gl.constexpr = ceil_div(N, BLOCK_N)
    groups = num_experts
    if SPLIT:
        groups += gl.where(any_is_split(tiles, span), places, 0)
    total = groups * M_TILES * N_TILES
    return Work(
        expert_start=expert_start, num_experts=num_experts, span=span, total=total, SPLIT=SPLIT,
        M=M, N=N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, M_TILES=M_TILES, N_TILES=N_TILES,
    )  # fmt: skip


@gluon.jit
def gather(smem, source, token, ok, column, COLUMNS: gl.constexpr, L: gl.constexpr):
    """Start the copy of the tokens' rows from `column` on; zeros where not `ok`."""
    c = column + gl.arange(0, smem.shape[1], gl.SliceLayout(0, L))
    ptr = source + (token.to(gl.int64) * COLUMNS)[:, None] + c[None, :]
    copy_gathered(smem, ptr, mask=ok[:, None] & (c < COLUMNS)[None, :])


@gluon.jit
def _tokens(row_token, row, end, r):
    """The tokens of the rows `row` + r; zero past the expert's end."""
    return gl.load(row_token + row + r, mask=row + r < end, other=0)


@aggregate
class Ring:
    """A stage has both consumers' halves of the left operand, then the right: BLOCK_K rows each."""

    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    stages: Stages
    BLOCK_K: gl.constexpr


@gluon.jit
def _producer(
    left, right, row_token, work, ring, GATHER_LEFT: gl.constexpr, GATHER_RIGHT: gl.constexpr
):
    """The producer warpgroup: fill the ring buffer for all work items of this program."""
    BLOCK_K: gl.constexpr = ring.BLOCK_K
    BLOCK_M: gl.constexpr = work.BLOCK_M
    BLOCK_N: gl.constexpr = work.BLOCK_N
    CONSUMER_M: gl.constexpr = BLOCK_M // 2
    GATHERED: gl.constexpr = min(CONSUMER_M if GATHER_LEFT else BLOCK_N, 256) // 8
    L: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // GATHERED, GATHERED], [gl.num_warps(), 1], [1, 0]
    )
    GATHER: gl.constexpr = GATHER_LEFT or GATHER_RIGHT
    BYTES: gl.constexpr = (
        2 * BLOCK_K * ((0 if GATHER_LEFT else BLOCK_M) + (0 if GATHER_RIGHT else BLOCK_N))
    )
    r = gl.arange(0, BLOCK_K, gl.SliceLayout(1, L))
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    rows, following = work.first_two()
    if GATHER:
        token = _tokens(row_token, rows.start, rows.end, r)
    step = 0
    for index in range(first, work.total, stride):
        m, n = work.tile(index)
        m0 = m * BLOCK_M
        n0 = n * BLOCK_N
        entry = work.load_entry(index + 2 * stride)
        if GATHER:
            first_token = _tokens(row_token, following.start, following.end, r)
        # Counted from zero: if the carried `start` is only the bound of an inner loop, Triton 3.6
        # uses its first value for all tiles, and the consumers deadlock.
        for block in range(gl.cdiv(rows.end - rows.start, BLOCK_K)):
            k = rows.start + block * BLOCK_K
            if GATHER:
                # Load the next block's tokens while this block waits for its stage.
                token_next = _tokens(row_token, k + BLOCK_K, rows.end, r)
            stage, barrier = ring.stages.acquire(step, BYTES)
            ok = k + r < rows.end
            upper = ring.left.index(2 * stage)
            lower = ring.left.index(2 * stage + 1)
            if GATHER_LEFT:
                gather(upper, left, token, ok, m0, work.M, L)
                gather(lower, left, token, ok, m0 + CONSUMER_M, work.M, L)
            else:
                load_rows(left, rows.end, k, m0, barrier, upper)
                load_rows(left, rows.end, k, m0 + CONSUMER_M, barrier, lower)
            if GATHER_RIGHT:
                gather(ring.right.index(stage), right, token, ok, n0, work.N, L)
            else:
                load_rows(right, rows.end, k, n0, barrier, ring.right.index(stage))
            if GATHER:
                async_copy.mbarrier_arrive(barrier, increment_count=False)
                token = token_next
            step += 1
        if GATHER:
            token = first_token
        rows, following = following, work.locate(index + 2 * stride, entry)
    if GATHER:
        async_copy.wait_group(0)


@gluon.jit
def _write(work, buffer, quarter, plane, m0, n0, ADD: gl.constexpr):
    """Store `quarter` in fp32, or add it if ADD: no two programs write the same element."""
    L: gl.constexpr = accumulator_layout(quarter.shape[1], gl.bfloat16)
    m = m0 + gl.arange(0, quarter.shape[0], gl.SliceLayout(1, L))
    n = n0 + gl.arange(0, quarter.shape[1], gl.SliceLayout(0, L))
    row = (plane.to(gl.int64) * work.M + m) * work.N
    ptr = buffer + row[:, None] + n[None, :]
    inside = (m < work.M)[:, None] & (n < work.N)[None, :]
    if ADD:
        gl.atomic_add(ptr, assume_layout(quarter, L), mask=inside, sem="relaxed")
    else:
        gl.store(ptr, assume_layout(quarter, L), mask=inside)


@aggregate
class Epilogue:
    """Stores dW in quarters: a whole expert to `out` by TMA, or to `out_fp32` without it; a span to
    its place in `partial`."""

    out: tma.tensor_descriptor | gl.constexpr  # may be None
    out_fp32: gl.tensor | gl.constexpr  # likewise
    partial: gl.tensor | gl.constexpr  # None if nothing is split
    smem: gl.shared_memory_descriptor  # two buffers for each consumer
    ADD: gl.constexpr

    @gluon.jit
    def apply(self, acc, work, group, rows, m0, n0, CONSUMER: gl.constexpr):
        """Store a consumer's half of a tile, at (m0, n0)."""
        QUARTER: gl.constexpr = acc.shape[1] // 4
        of_acc = quarters(acc)
        if work.SPLIT and group >= work.num_experts:
            if rows.end >= 0:
                place = group - work.num_experts
                for i in gl.static_range(4):
                    _write(work, self.partial, of_acc[i], place, m0, n0 + i * QUARTER, False)
        elif rows.end >= 0:
            any_row = rows.end > rows.start
            for i in gl.static_range(4):
                column = n0 + i * QUARTER
                if self.out_fp32 is not None:
                    if not self.ADD:
                        _write(work, self.out_fp32, of_acc[i], group, m0, column, False)
                    elif any_row:
                        _write(work, self.out_fp32, of_acc[i], group, m0, column, True)
                else:
                    tma.store_wait(1)  # the last store from this buffer, two quarters ago, is done
                    buffer = self.smem.index(2 * CONSUMER + i % 2)
                    buffer.reshape([acc.shape[0], QUARTER]).store(of_acc[i].to(self.out.dtype))
                    fence_async_shared()
                    copy_out(self.out, [group, m0, column], buffer)


@gluon.jit
def _consumer(CONSUMER: gl.constexpr, epilogue, work, ring):
    """A consumer warpgroup: its half of the rows M of every tile of this program."""
    BLOCK_N: gl.constexpr = work.BLOCK_N
    BLOCK_K: gl.constexpr = ring.BLOCK_K
    CONSUMER_M: gl.constexpr = work.BLOCK_M // 2
    L: gl.constexpr = accumulator_layout(BLOCK_N, ring.left.dtype)
    stages = ring.stages
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    rows = work.first()
    step = 0
    for index in range(first, work.total, stride):
        m, n = work.tile(index)
        m0 = m * work.BLOCK_M + CONSUMER * CONSUMER_M
        n0 = n * BLOCK_N
        entry = work.load_entry(index + stride)
        acc = gl.zeros((CONSUMER_M, BLOCK_N), gl.float32, L)
        for k in range(rows.start, rows.end, BLOCK_K):
            stage = stages.wait(step)
            if stages.GATHER:
                fence_async_shared()  # gathered rows were written by cp.async, not by TMA
            a = ring.left.index(2 * stage + CONSUMER).reshape([BLOCK_K, CONSUMER_M])
            b = ring.right.index(stage).reshape([BLOCK_K, BLOCK_N])
            acc = warpgroup_mma(a.permute((1, 0)), b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            stages.release_before(step, pred=k > rows.start)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        stages.release_before(step, pred=rows.end > rows.start)
        epilogue.apply(acc, work, work.group(index), rows, m0, n0, CONSUMER)
        rows = work.locate(index + stride, entry)
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
    GATHER: gl.constexpr = GATHER_LEFT or GATHER_RIGHT
    dtype: gl.constexpr = right.dtype if GATHER_LEFT else left.dtype
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if GATHER_LEFT:
        left_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_K, CONSUMER_M], PLAIN)
    else:
        left_smem = gl.allocate_shared_memory(dtype, [2 * STAGES] + left.block_shape, left.layout)
    if GATHER_RIGHT:
        right_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], PLAIN)
    else:
        right_smem = gl.allocate_shared_memory(dtype, [STAGES] + right.block_shape, right.layout)
    if out_fp32 is None:
        out_smem = gl.allocate_shared_memory(dtype, [4] + out.block_shape, out.layout)
    else:
        out_smem = left_smem  # not used
    stages = make_stages(STAGES, GATHER)
    ring = Ring(left=left_smem, right=right_smem, stages=stages, BLOCK_K=BLOCK_K)
    SPLIT: gl.constexpr = partial is not None
    work = make_work(expert_start, tiles, num_experts, span, places, SPLIT, M, N, BLOCK_M, BLOCK_N)
    epilogue = Epilogue(out=out, out_fp32=out_fp32, partial=partial, smem=out_smem, ADD=ADD)
    gl.warp_specialize(
        [
            (_consumer, (0, epilogue, work, ring)),
            (_consumer, (1, epilogue, work, ring)),
            (_producer, (left, right, row_token, work, ring, GATHER_LEFT, GATHER_RIGHT)),
        ],
        [4, 4 if GATHER else 1],
        [(504 - PRODUCER_REGISTERS) // 2, PRODUCER_REGISTERS],
    )
