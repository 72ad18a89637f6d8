"""Weight gradients of e4m3 operands on Hopper: one producer warpgroup, two consumer warpgroups.

FP8 wgmma wants both operands K-major, and K are the rows. One operand lies transposed in memory and
comes by TMA. The other is gathered row by row: the consumers load it through registers and
transpose it there, as pairs of columns. So a consumer has one accumulator for the even rows of its
half of the tile, and one for the odd rows.

A tile is (BLOCK_M, BLOCK_N) of one expert's gradient. Blocks have 128 rows: the transposed operand
has each expert's rows in tiles of 128 columns, see `shapes.padded_rows`.
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

from .epilogue import quarters
from .gluon_compat import aggregate, copy_gathered, copy_in, copy_out, reinterpreted
from .ring import accumulator_layout, assume_layout, make_stages
from .wgrad import Ring, gather, make_work

PRODUCER_REGISTERS = gl.constexpr(72)
BLOCK_M = gl.constexpr(256)
BLOCK_N = gl.constexpr(128)
BLOCK_K = gl.constexpr(128)
CONSUMER_M = gl.constexpr(128)


@gluon.jit
def exchange(row):
    """The row of a block that row `row` of shared memory holds: bits 0 and 3 exchanged.

    Both operands must have the same row at every k = 16c + 4t + 2h + p of K (t < 4, h and p < 2):

    - The transposed operand has row 16c + 8p + 2t + h of its tile in column k. A thread of the dZ
      GEMM holds rows r and r + 8 of sixteen and stores them as neighbours: `fp8_dz._packed_rows`,
      `reference.fp8.row_of_column`.
    - A consumer finds row 16c + 8h + 2t + p of shared memory at k, because it loads 16-bit elements
      and uses them as pairs of 8-bit ones: `_transposed`.

    So the producer puts row 8p + 2t + h where the consumer looks for row 8h + 2t + p.
    """
    return (row & ~9) | ((row & 1) << 3) | ((row >> 3) & 1)


@gluon.jit
def _tokens(row_token, row, end, GATHER: gl.constexpr):
    """The tokens of the rows; -1 past the expert's end."""
    if GATHER:
        return gl.load(row_token + row, mask=row < end, other=-1)
    else:
        return gl.where(row < end, row, -1)


@gluon.jit
def _producer(rows8, row_token, other_t, work, ring, GATHER: gl.constexpr):
    """The producer warpgroup: fill the ring buffer for all work items of this program.

    A stage has both consumers' columns of the gathered rows, with rows in the order of `exchange`,
    then the block of the transposed operand.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = exchange(gl.arange(0, BLOCK_K, gl.SliceLayout(1, L)))
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    rows, following = work.first_two()
    token = _tokens(row_token, rows.start + r, rows.end, GATHER)
    step = 0
    for index in range(first, work.total, stride):
        m, n = work.tile(index)
        m0 = m * BLOCK_M
        entry = work.load_entry(index + 2 * stride)
        first_token = _tokens(row_token, following.start + r, following.end, GATHER)
        tile = rows.start // BLOCK_K + rows.expert  # of a span too: spans are multiples of BLOCK_K
        for block in range(gl.cdiv(rows.end - rows.start, BLOCK_K)):
            # Load the next block's tokens while this block waits for its stage.
            next_row = rows.start + (block + 1) * BLOCK_K + r
            token_next = _tokens(row_token, next_row, rows.end, GATHER)
            stage, barrier = ring.stages.acquire(step, BLOCK_N * BLOCK_K)
            corner = [n * BLOCK_N, (tile + block) * BLOCK_K]
            copy_in(other_t, corner, barrier, ring.right.index(stage))
            ok = token >= 0
            gather(ring.left.index(2 * stage), rows8, token, ok, m0, work.M, L)
            gather(ring.left.index(2 * stage + 1), rows8, token, ok, m0 + CONSUMER_M, work.M, L)
            async_copy.mbarrier_arrive(barrier, increment_count=False)
            token = token_next
            step += 1
        token = first_token
        rows, following = following, work.locate(index + 2 * stride, entry)
    async_copy.wait_group(0)


@gluon.jit
def _transposed(smem):
    """Even and odd columns of (BLOCK_K, CONSUMER_M) shared memory, as two operands A.

    Pairs of columns are loaded transposed as elements of 16 bits, which gives the registers of an
    FP8 operand but for the order of K, see `exchange`, and for the pairs, which prmt takes apart.
    """
    PACKED: gl.constexpr = CONSUMER_M // 2
    L16: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(BLOCK_N, gl.int16), 2)
    L8: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(BLOCK_N, gl.int8), 4)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    packed = reinterpreted(smem, gl.int16, [BLOCK_K, PACKED], layout)
    packed = gl.reshape(packed.permute((1, 0)).load(L16), (PACKED, BLOCK_K // 16, 2, 4, 2))
    packed = gl.reshape(gl.permute(packed, (0, 1, 3, 2, 4)), (PACKED, BLOCK_K))
    even, odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=r,=r,r,r",
        [assume_layout(packed, L8)],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )
    return even.to(gl.float8e4nv, bitcast=True), odd.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _interleaved(even, odd):
    """Rows of the two accumulators, interleaved: (2·ROWS, COLUMNS)."""
    ROWS: gl.constexpr = even.shape[0]
    COLUMNS: gl.constexpr = even.shape[1]
    return gl.reshape(gl.permute(gl.join(even, odd), (0, 2, 1)), (2 * ROWS, COLUMNS))


@gluon.constexpr_function
def _rows_first(layout):
    """`layout` of an interleaved quarter, with a thread's two neighbouring rows in two successive
    registers: a store vectorizes over those."""
    *registers, row = layout.reg_bases
    return gl.DistributedLinearLayout(
        [row, *registers], layout.lane_bases, layout.warp_bases, layout.block_bases, layout.shape
    )


@gluon.jit
def _write(work, buffer, quarter, plane, m0, n0, TRANSPOSED: gl.constexpr, ADD: gl.constexpr):
    """Store `quarter` in fp32, or add it if ADD: no two programs write the same element."""
    L: gl.constexpr = _rows_first(quarter.type.layout) if TRANSPOSED else quarter.type.layout
    quarter = assume_layout(quarter, L)
    m = (m0 + gl.arange(0, quarter.shape[0], gl.SliceLayout(1, L)))[:, None]
    n = (n0 + gl.arange(0, quarter.shape[1], gl.SliceLayout(0, L)))[None, :]
    base = buffer + plane.to(gl.int64) * (work.M * work.N)
    ptr = base + (n * work.M + m if TRANSPOSED else m * work.N + n)
    inside = (m < work.M) & (n < work.N)
    if ADD:
        gl.atomic_add(ptr, quarter, mask=inside, sem="relaxed")
    else:
        gl.store(ptr, quarter, mask=inside)


@aggregate
class Epilogue:
    """Stores dW·scale in quarters: a whole expert to `out` by TMA, or to `out_fp32` without it; a
    span to its place in `partial`."""

    scale: gl.tensor
    out: tma.tensor_descriptor | gl.constexpr  # may be None
    out_fp32: gl.tensor | gl.constexpr  # likewise
    partial: gl.tensor | gl.constexpr  # None if nothing is split
    smem: gl.shared_memory_descriptor  # BUFFERS for each consumer
    scale_smem: gl.shared_memory_descriptor  # four quarters for each
    BUFFERS: gl.constexpr
    TRANSPOSED: gl.constexpr
    ADD: gl.constexpr

    @gluon.jit
    def before(self, expert, n, any_row, N: gl.constexpr, CONSUMER: gl.constexpr):
        """Start the copy of the scales (E, N) of a tile's columns to shared memory; zeros unless
        `any_row`."""
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        smem = reinterpreted(self.scale_smem, gl.float32, [2, BLOCK_N], plain).index(CONSUMER)
        column = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0]))
        source = self.scale + expert.to(gl.int64) * N + column
        copy_gathered(smem, source, mask=(column < N) & any_row)
        async_copy.commit_group()

    @gluon.jit
    def apply(self, even, odd, work, group, rows, m0, n, CONSUMER: gl.constexpr):
        """Store a consumer's half of a tile, from the accumulators of its even and odd rows."""
        even_quarters = quarters(even)
        odd_quarters = quarters(odd)
        async_copy.wait_group(0)
        if rows.end >= 0:
            for i in gl.static_range(4):
                column = n * BLOCK_N + i * (BLOCK_N // 4)
                factor = self.scale_smem.index(4 * CONSUMER + i).load(
                    gl.SliceLayout(0, even_quarters[i].type.layout)
                )[None, :]
                quarter = _interleaved(even_quarters[i] * factor, odd_quarters[i] * factor)
                if work.SPLIT and group >= work.num_experts:
                    place = group - work.num_experts
                    _write(work, self.partial, quarter, place, m0, column, self.TRANSPOSED, False)
                elif self.out_fp32 is None:
                    tma.store_wait(self.BUFFERS - 1)  # the last store from this buffer is done
                    buffer = self.smem.index(self.BUFFERS * CONSUMER + i % self.BUFFERS)
                    self.store(quarter, group, m0, column, buffer)
                elif not self.ADD:
                    _write(work, self.out_fp32, quarter, group, m0, column, self.TRANSPOSED, False)
                elif rows.end > rows.start:
                    _write(work, self.out_fp32, quarter, group, m0, column, self.TRANSPOSED, True)

    @gluon.jit
    def store(self, quarter, expert, m0, n0, buffer):
        """Store a quarter by TMA."""
        if self.TRANSPOSED:
            view = buffer.reshape([quarter.shape[1], quarter.shape[0]]).permute((1, 0))
        else:
            view = buffer.reshape([quarter.shape[0], quarter.shape[1]])
        view.store(quarter.to(self.out.dtype))
        fence_async_shared()
        copy_out(self.out, [expert, n0, m0] if self.TRANSPOSED else [expert, m0, n0], buffer)


@gluon.jit
def _consumer(CONSUMER: gl.constexpr, epilogue, work, ring):
    """A consumer warpgroup: its half of the rows M of every tile of this program.

    The wgmma reads the rows from registers, so a stage is released only when it has finished.
    """
    L: gl.constexpr = accumulator_layout(BLOCK_N, ring.left.dtype)
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    rows = work.first()
    step = 0
    for index in range(first, work.total, stride):
        m, n = work.tile(index)
        m0 = m * BLOCK_M + CONSUMER * CONSUMER_M
        entry = work.load_entry(index + stride)
        # `end > start` is read here so that Triton 3.6 sees that `start` is carried: it looks for
        # readers everywhere but in bounds of inner loops, and the consumers would deadlock.
        epilogue.before(rows.expert, n, rows.end > rows.start, work.N, CONSUMER)
        even = gl.zeros((CONSUMER_M // 2, BLOCK_N), gl.float32, L)
        odd = gl.zeros((CONSUMER_M // 2, BLOCK_N), gl.float32, L)
        for _ in range(gl.cdiv(rows.end - rows.start, BLOCK_K)):
            stage = ring.stages.wait(step)
            # No fence: gathered rows are read by threads here, not by wgmma.
            a_even, a_odd = _transposed(ring.left.index(2 * stage + CONSUMER))
            b = ring.right.index(stage).permute((1, 0))
            even = warpgroup_mma(a_even, b, even, is_async=True)
            odd = warpgroup_mma(a_odd, b, odd, is_async=True)
            even, odd = warpgroup_mma_wait(0, deps=(even, odd))
            ring.stages.release(stage)
            step += 1
        epilogue.apply(even, odd, work, work.group(index), rows, m0, n, CONSUMER)
        rows = work.locate(index + stride, entry)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["span", "places"])
def hopper_fp8_wgrad_kernel(
    rows8, row_token, other_t, scale, out, out_fp32, partial, expert_start, tiles, num_experts,
    span, places,
    M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    GATHER: gl.constexpr, TRANSPOSED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """out[e] (M, N) = Σ_r rows8[token of r, :]ᵀ other[r, :] · scale[e] over the rows of expert e.

    `other` is given as `other_t`, transposed and padded. The gradient lies in memory as (E, M, N),
    or as (E, N, M) if TRANSPOSED; so do the partial sums, which are scaled too. Instead of `out`,
    `out_fp32` may be given, to which the sums are added if ADD. Without GATHER row r is rows8[r].

    Grid: one program per SM; each walks over (expert or span, M-tile, N-tile) and owns the tiles
    that it writes.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    rows_smem = gl.allocate_shared_memory(other_t.dtype, [2 * STAGES, BLOCK_K, CONSUMER_M], layout)
    other_smem = gl.allocate_shared_memory(
        other_t.dtype, [STAGES, BLOCK_N, BLOCK_K], other_t.layout
    )
    if out_fp32 is None:
        out_smem = gl.allocate_shared_memory(out.dtype, [2 * BUFFERS] + out.block_shape, out.layout)
    else:
        out_smem = rows_smem  # not used
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scale_smem = gl.allocate_shared_memory(gl.float32, [8, BLOCK_N // 4], plain)
    stages = make_stages(STAGES, True)
    ring = Ring(left=rows_smem, right=other_smem, stages=stages, BLOCK_K=BLOCK_K)
    SPLIT: gl.constexpr = partial is not None
    work = make_work(expert_start, tiles, num_experts, span, places, SPLIT, M, N, BLOCK_M, BLOCK_N)
    epilogue = Epilogue(
        scale=scale, out=out, out_fp32=out_fp32, partial=partial, smem=out_smem,
        scale_smem=scale_smem, BUFFERS=BUFFERS, TRANSPOSED=TRANSPOSED, ADD=ADD,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (0, epilogue, work, ring)),
            (_consumer, (1, epilogue, work, ring)),
            (_producer, (rows8, row_token, other_t, work, ring, GATHER)),
        ],
        [4, 4],
        [(504 - PRODUCER_REGISTERS) // 2, PRODUCER_REGISTERS],
    )
