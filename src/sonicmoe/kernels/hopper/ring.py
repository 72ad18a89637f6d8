"""The ring buffer of the Hopper GEMMs over rows, and the producer warpgroup that fills it.

A tile is 128 rows by BLOCK_N columns. The producer fills a ring buffer of `STAGES` blocks of
BLOCK_K: weights by TMA, rows by TMA if they lie in order, else gathered row by row with cp.async.
Each of two consumers owns 64 rows of the tile: see `consumer`.

Look-ahead: a producer knows its next work item already and loads the table entry of the one after
that (`later`), because such a load takes as long as one step of the loop.

With a LoRA adapter, U (R, r) and B (E, N, r) in the layout of the weights, the producer appends
blocks of U and B to those of A and W. The consumers only see more steps. Beside A and W in e4m3, U
and B are in bf16, and their blocks have the bytes of the others: half as many columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from ..tile_order import corner_of, load_tile
from .gluon_compat import aggregate, copy_gathered, copy_in, reinterpreted
from .ragged import load_rows

CONSUMER_M = gl.constexpr(64)  # rows of one consumer warpgroup: the M of wgmma


@gluon.constexpr_function
def ceil_div(a, b):
    return (a + b - 1) // b


@gluon.constexpr_function
def accumulator_layout(columns, dtype):
    """Layout of a consumer's (64, columns) accumulator: a wgmma takes 32 bytes of K."""
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, columns, 256 // dtype.primitive_bitwidth],
    )


@gluon.jit
def assume_layout(x, L: gl.constexpr):
    """`x` in another layout in which every thread holds the same elements: no data moves."""
    return gl.convert_layout(x, L, assert_trivial=True)


# --- shared memory --------------------------------------------------------------------------------
@gluon.jit
def buffers(dtype: gl.constexpr, COUNT: gl.constexpr, SHAPE: gl.constexpr):
    """Shared memory for COUNT matrices."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    return gl.allocate_shared_memory(dtype, [COUNT] + SHAPE, layout)


@gluon.jit
def view(smem, dtype: gl.constexpr, COUNT: gl.constexpr, SHAPE: gl.constexpr):
    """Shared memory as COUNT tensors of another dtype and shape."""
    ALL: gl.constexpr = [COUNT] + SHAPE
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    return reinterpreted(smem, dtype, ALL, LAYOUT)


@gluon.constexpr_function
def _half_the_columns(shape):
    return [*shape[1:-1], shape[-1] // 2]


@gluon.jit
def _in_bf16(smem):
    """Buffers of e4m3 as as many of bf16, with half the columns."""
    SHAPE: gl.constexpr = _half_the_columns(smem.shape)
    return view(smem, gl.bfloat16, smem.shape[0], SHAPE)


@aggregate
class Stages:
    """The barriers of a ring buffer's stages."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    GATHER: gl.constexpr  # cp.async fills the stages too

    @gluon.jit
    def acquire(self, step, BYTES: gl.constexpr):
        """The producer's stage of a step, once it is empty, and the barrier of BYTES by TMA."""
        stage = step % self.STAGES
        mbarrier.wait(self.empty.index(stage), (step // self.STAGES & 1) ^ 1)
        mbarrier.expect(self.full.index(stage), BYTES)
        return stage, self.full.index(stage)

    @gluon.jit
    def wait(self, step):
        """A consumer's stage of a step, once it is full."""
        stage = step % self.STAGES
        mbarrier.wait(self.full.index(stage), step // self.STAGES & 1)
        return stage

    @gluon.jit
    def release(self, stage, pred=True):
        """Hand a stage back to the producer; it is empty when both consumers have."""
        mbarrier.arrive(self.empty.index(stage), count=1, pred=pred)

    @gluon.jit
    def release_before(self, step, pred=True):
        """Release the stage of the step before `step`."""
        self.release((step + self.STAGES - 1) % self.STAGES, pred)


@gluon.jit
def make_stages(STAGES: gl.constexpr, GATHER: gl.constexpr):
    """Barriers of STAGES stages, initialized."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ARRIVALS: gl.constexpr = 129 if GATHER else 1  # TMA, and each of the producer's 128 threads
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)
    return Stages(full=full, empty=empty, STAGES=STAGES, GATHER=GATHER)


# --- tiles ----------------------------------------------------------------------------------------
@aggregate
class Tile:
    """Where a consumer's 64 rows of a tile lie."""

    expert: gl.tensor
    start: gl.tensor  # the expert's first row
    end: gl.tensor  # the expert's end row
    row: gl.tensor  # their first row
    n: gl.tensor  # the N-tile
    count: gl.tensor  # of this program's tiles before
    r: gl.tensor  # 0 to 63, in the layout of the epilogue's ROWS
    CONSUMER: gl.constexpr  # 0 or 1

    @gluon.jit
    def inside(self):
        """Which of the rows are the expert's."""
        return self.row + self.r < self.end

    @gluon.jit
    def load(self, values, other):
        """values[row], `other` past the expert's end."""
        return gl.load(values + self.row + self.r, mask=self.inside(), other=other)

    @gluon.jit
    def indices(self, index):
        """index[row]; the row itself if there is no index."""
        if index is None:
            return self.row + self.r
        else:
            return self.load(index, 0)


# --- the ring buffer ------------------------------------------------------------------------------
@aggregate
class Ring:
    """The ring buffer of a GEMM of rows (R, K) with weights (E, N, K), and its tile table."""

    tiles: gl.tensor
    total: gl.tensor  # work items: N-tiles of all tiles
    a: gl.shared_memory_descriptor  # (2·STAGES, 64, BLOCK_K): both consumers' rows of each stage
    w: gl.shared_memory_descriptor
    stages: Stages
    K: gl.constexpr
    N: gl.constexpr
    RANK: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    WEIGHT_LAYOUT: gl.constexpr
    GATE_UP: gl.constexpr
    BLOCK_SCALES: gl.constexpr  # whether rows have a scale for each block of K

    @gluon.jit
    def load_entry(self, index):
        """The tile table's entry for work item `index`; past the last item its header, with end
        row 0.

        Called well before `corner` and `locate`, which wait for the load.
        """
        n_tiles: gl.constexpr = ceil_div(self.N, self.BLOCK_N)
        return load_tile(self.tiles, gl.where(index < self.total, index // n_tiles, -1))

    @gluon.jit
    def corner(self, index, entry):
        """First row and N-tile of work item `index`; past the last item the row is not below the
        entry's end row."""
        _, start, end, number = entry
        return corner_of(index, start, end, number, self.K, self.N, 2 * CONSUMER_M, self.BLOCK_N)

    @gluon.jit
    def locate(self, index, entry, count, r, CONSUMER: gl.constexpr):
        """A consumer's rows of the tile of work item `index`."""
        expert, start, end, _ = entry
        row, n = self.corner(index, entry)
        return Tile(
            expert=expert, start=start, end=end, row=row + CONSUMER * CONSUMER_M, n=n, count=count,
            r=r, CONSUMER=CONSUMER,
        )  # fmt: skip

    @gluon.jit
    def low_rank(self):
        """This ring buffer as the blocks of U and B see it."""
        if self.a.dtype == gl.float8e4nv:
            HALF: gl.constexpr = self.BLOCK_K // 2
            return self.replace(a=_in_bf16(self.a), w=_in_bf16(self.w), BLOCK_K=HALF)
        else:
            return self


@gluon.jit
def make_ring(
    dtype: gl.constexpr, w, tiles, K: gl.constexpr, N: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_LAYOUT: gl.constexpr, GATE_UP: gl.constexpr, GATHER: gl.constexpr,
    BLOCK_SCALES: gl.constexpr = False,
):  # fmt: skip
    """The ring buffer of a kernel; `dtype` is that of A, `w` the descriptor of the weights."""
    a_smem = buffers(dtype, 2 * STAGES, [CONSUMER_M, BLOCK_K])
    if WEIGHT_LAYOUT == "kn" and GATE_UP == "concatenated":
        w_smem = buffers(w.dtype, STAGES, [BLOCK_K, BLOCK_N])
    else:
        w_smem = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)
    stages = make_stages(STAGES, GATHER)
    total = gl.load(tiles) * ceil_div(N, BLOCK_N)
    return Ring(
        tiles=tiles, total=total, a=a_smem, w=w_smem, stages=stages, K=K, N=N, RANK=RANK,
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, WEIGHT_LAYOUT=WEIGHT_LAYOUT, GATE_UP=GATE_UP,
        BLOCK_SCALES=BLOCK_SCALES,
    )  # fmt: skip


# --- the producer ---------------------------------------------------------------------------------
@gluon.jit
def _load_weights(ring, w, expert, column, k, barrier, stage):
    """Start the TMA load of the weights' block at (column, k) into `stage` of the ring.

    For concatenated gate/up weights `column` is that of the first gate; its ups come with it.
    """
    if ring.WEIGHT_LAYOUT == "kn" and ring.GATE_UP == "concatenated":
        # Columns lie in panels of 64, so gates and ups next to each other are one tile.
        shape: gl.constexpr = [2 * ring.stages.STAGES, 1, ring.BLOCK_K, 1, ring.BLOCK_N // 2]
        layout: gl.constexpr = w.layout
        half = reinterpreted(ring.w, w.dtype, shape, layout)
        copy_in(w, [expert, k, 0, column], barrier, half.index(2 * stage))
        copy_in(w, [expert, k, 1, column], barrier, half.index(2 * stage + 1))
    elif ring.WEIGHT_LAYOUT == "kn":
        copy_in(w, [expert, k, column], barrier, ring.w.index(stage))
    elif ring.GATE_UP == "concatenated":
        copy_in(w, [expert, 0, column, k], barrier, ring.w.index(stage))
    else:
        copy_in(w, [expert, column, k], barrier, ring.w.index(stage))


@gluon.jit
def _load_both(ring, a, end, row, k, barrier, stage):
    """Start the TMA loads of both consumers' rows, which lie in order."""
    for half in gl.static_range(2):
        box = ring.a.index(2 * stage + half).reshape([1, 1, CONSUMER_M, ring.BLOCK_K])
        load_rows(a, end, row + half * CONSUMER_M, k, barrier, box)


@gluon.jit
def _tokens(row_token, row, end, r):
    """Token of each of 64 rows; −1 past the expert's end."""
    return gl.load(row_token + row + r, mask=row + r < end, other=-1)


@gluon.jit
def _tokens_of_both(row_token, entry, corner, r):
    """Tokens of both consumers' rows."""
    _, _, end, _ = entry
    row, _ = corner
    return _tokens(row_token, row, end, r), _tokens(row_token, row + CONSUMER_M, end, r)


@gluon.jit
def producer(ring, a, row_token, w, lora_u, lora_b):
    """The producer warpgroup: fill the ring buffer for all tiles of this program.

    Rows past an expert's end are zeros: zeros draw less power, and power is the limit. With other
    rows there the layer takes 2.4% longer at 32768,2048,512,512,10.
    """
    BLOCK_N: gl.constexpr = ring.BLOCK_N
    BLOCK_K: gl.constexpr = ring.BLOCK_K
    K: gl.constexpr = ring.K
    GATHER: gl.constexpr = ring.stages.GATHER
    SIZE: gl.constexpr = ring.a.dtype.primitive_bitwidth // 8
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
    entry = ring.load_entry(first)
    next_entry = ring.load_entry(first + stride)
    corner = ring.corner(first, entry)
    next_corner = ring.corner(first + stride, next_entry)
    if GATHER:
        upper, lower = _tokens_of_both(row_token, entry, corner, r)
    step = 0
    for index in range(first, ring.total, stride):
        expert, _, end, _ = entry
        row, n = corner
        column = n * (BLOCK_N // 2 if ring.GATE_UP == "concatenated" else BLOCK_N)
        later = index + 2 * stride
        later_entry = ring.load_entry(later)
        if GATHER:
            upper_ptr = a + (upper.to(gl.int64) * K)[:, None] + offs_k[None, :]
            lower_ptr = a + (lower.to(gl.int64) * K)[:, None] + offs_k[None, :]
            upper_ok = (upper >= 0)[:, None]
            lower_ok = (lower >= 0)[:, None]
            upper, lower = _tokens_of_both(row_token, next_entry, next_corner, r)
        for k in range(0, K, BLOCK_K):
            stage, barrier = ring.stages.acquire(step, BYTES)
            _load_weights(ring, w, expert, column, k, barrier, stage)
            if GATHER:
                inside = (k + offs_k < K)[None, :] if K % BLOCK_K else True
                copy_gathered(ring.a.index(2 * stage), upper_ptr + k, mask=upper_ok & inside)
                copy_gathered(ring.a.index(2 * stage + 1), lower_ptr + k, mask=lower_ok & inside)
                async_copy.mbarrier_arrive(barrier, increment_count=False)
            else:
                _load_both(ring, a, end, row, k, barrier, stage)
            step += 1
        if ring.RANK:
            low_rank = ring.low_rank()
            for k in range(0, ring.RANK, low_rank.BLOCK_K):
                stage, barrier = ring.stages.acquire(step, IN_ORDER)
                _load_weights(low_rank, lora_b, expert, column, k, barrier, stage)
                _load_both(low_rank, lora_u, end, row, k, barrier, stage)
                if GATHER:
                    async_copy.mbarrier_arrive(barrier, increment_count=False)
                step += 1
        entry, corner = next_entry, next_corner
        next_entry, next_corner = later_entry, ring.corner(later, later_entry)
    if GATHER:
        async_copy.wait_group(0)
