"""Up on Hopper: Z = X W1ᵀ and A = act(Z) in the epilogue. The main loop is in `ring`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..quantize import scale_and_inverse
from .ragged import store_rows_of_half
from .ring import (
    CONSUMER_M,
    halves,
    next_tile,
    pairs,
    producer,
    quarters,
    stage_and_store,
    weight_ring,
    z_buffer,
)


@gluon.jit
def _stage_and_store_half(value, out, end, row, half, column, smem, COLUMNS: gl.constexpr):
    """`stage_and_store` into the gate (0) or up (1) half of a concatenated Z."""
    smem.store(value)
    fence_async_shared()
    store_rows_of_half(out, end, row, half, column, smem.reshape([1, 1, CONSUMER_M, 1, COLUMNS]))


@gluon.jit
def _biased(part, b1, expert, column, N: gl.constexpr, COLUMNS: gl.constexpr, L: gl.constexpr):
    """`part` plus the bias of its columns, if there is a bias."""
    if b1 is None:
        return part
    else:
        c = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
        bias = gl.load(b1 + expert * N + c, mask=c < N, other=0.0)
        return part + gl.expand_dims(bias.to(gl.float32), 0)


@gluon.jit
def _store_scale(
    amax, z_scale, num_rows, end, row, block, N: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Store the scales (64,) of a block of Z, return their inverses (64, 1)."""
    scale, inverse = scale_and_inverse(amax)
    r = row + gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
    inside = (r < end) & (block < (N + 127) // 128)
    gl.store(z_scale + block * num_rows.to(gl.int64) + r, scale, mask=inside)
    return gl.expand_dims(inverse, 1)


@gluon.jit
def _store_gated(
    acc, z, z_scale, num_rows, a, b1, expert, end, row, n, smem,
    CONSUMER: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr,
    GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr, KEEP_Z: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store Z (64, BLOCK_N) and A (64, BLOCK_N/2) of a gated activation."""
    HALF: gl.constexpr = BLOCK_N // 2
    PIECE: gl.constexpr = BLOCK_N // 4
    I: gl.constexpr = N // 2
    STORES: gl.constexpr = 3 if KEEP_Z else 1  # per piece of A; they alternate between two buffers
    q0, q1, q2, q3 = quarters(acc)
    # Two pieces of Z make one piece of A: gates and their ups, or two neighbours of pairs.
    if GATE_UP == "concatenated":
        pieces = (q0, q2, q1, q3)
    else:
        pieces = (q0, q1, q2, q3)
    for i in gl.static_range(2):
        g = gl.convert_layout(pieces[2 * i], L, assert_trivial=True)
        u = gl.convert_layout(pieces[2 * i + 1], L, assert_trivial=True)
        if GATE_UP == "concatenated":
            g_column = n * HALF + i * PIECE
            u_column = I + g_column
        else:
            g_column = n * BLOCK_N + 2 * i * PIECE
            u_column = g_column + PIECE
        g = _biased(g, b1, expert, g_column, N, PIECE, L)
        u = _biased(u, b1, expert, u_column, N, PIECE, L)
        if GATE_UP == "concatenated":
            value = ACTIVATION(g, u).to(a.dtype)
        else:
            g0, u0 = pairs(g, PIECE)
            g1, u1 = pairs(u, PIECE)
            v0 = ACTIVATION(g0, u0).to(a.dtype)
            v1 = ACTIVATION(g1, u1).to(a.dtype)
            value = gl.reshape(gl.permute(gl.join(v0, v1), (0, 2, 1)), (CONSUMER_M, PIECE))
            value = gl.convert_layout(value, L)
        first_smem = smem.index(2 * CONSUMER + i * STORES % 2)
        second_smem = smem.index(2 * CONSUMER + (i * STORES + 1) % 2)
        if KEEP_Z:
            if z_scale is not None:  # BLOCK_N is 256, so these pieces are one block
                amax = gl.maximum(gl.max(gl.abs(g), 1), gl.max(gl.abs(u), 1))
                inverse = _store_scale(amax, z_scale, num_rows, end, row, 2 * n + i, N, L)
                g = g * inverse
                u = u * inverse
            g_smem = z_buffer(z, first_smem)
            u_smem = z_buffer(z, second_smem)
            tma.store_wait(1)
            if GATE_UP == "concatenated":
                _stage_and_store_half(g.to(z.dtype), z, end, row, 0, g_column, g_smem, PIECE)
            else:
                stage_and_store(g.to(z.dtype), z, end, row, g_column, g_smem, PIECE)
            tma.store_wait(1)
            if GATE_UP == "concatenated":
                _stage_and_store_half(u.to(z.dtype), z, end, row, 1, g_column, u_smem, PIECE)
            else:
                stage_and_store(u.to(z.dtype), z, end, row, u_column, u_smem, PIECE)
        tma.store_wait(1)
        stage_and_store(value, a, end, row, n * HALF + i * PIECE, first_smem, PIECE)


@gluon.jit
def _store_plain(
    acc, z, a, b1, expert, end, row, n, smem,
    CONSUMER: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr,
    ACTIVATION: gl.constexpr, KEEP_Z: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store Z and A, both (64, BLOCK_N), of an activation without a gate."""
    PIECE: gl.constexpr = BLOCK_N // 4
    pieces = quarters(acc)
    for i in gl.static_range(4):
        column = n * BLOCK_N + i * PIECE
        part = gl.convert_layout(pieces[i], L, assert_trivial=True)
        part = _biased(part, b1, expert, column, N, PIECE, L)
        if KEEP_Z:
            tma.store_wait(1)
            stage_and_store(part.to(z.dtype), z, end, row, column, smem.index(2 * CONSUMER), PIECE)
        value = ACTIVATION(part).to(a.dtype)
        tma.store_wait(1)
        a_smem = smem.index(2 * CONSUMER + (1 if KEEP_Z else i % 2))
        stage_and_store(value, a, end, row, column, a_smem, PIECE)


@gluon.jit
def _store_plain_fp8(
    acc, z, z_scale, num_rows, a, b1, expert, end, row, n, smem,
    CONSUMER: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr,
    ACTIVATION: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """`_store_plain` with Z in e4m3. BLOCK_N is 256, so half of it is one block."""
    PIECE: gl.constexpr = BLOCK_N // 4
    now, then = halves(acc)
    for block in range(2):  # not unrolled: GELU of both halves at once spills 24 registers
        column = n * BLOCK_N + 2 * block * PIECE
        left, right = halves(now)
        left = gl.convert_layout(left, L, assert_trivial=True)
        right = gl.convert_layout(right, L, assert_trivial=True)
        left = _biased(left, b1, expert, column, N, PIECE, L)
        right = _biased(right, b1, expert, column + PIECE, N, PIECE, L)
        amax = gl.maximum(gl.max(gl.abs(left), 1), gl.max(gl.abs(right), 1))
        inverse = _store_scale(amax, z_scale, num_rows, end, row, 2 * n + block, N, L)
        both = (left, right)
        for i in gl.static_range(2):
            z_smem, a_smem = z_buffer(z, smem.index(2 * CONSUMER)), smem.index(2 * CONSUMER + 1)
            tma.store_wait(1)
            part = (both[i] * inverse).to(z.dtype)
            stage_and_store(part, z, end, row, column + i * PIECE, z_smem, PIECE)
            value = ACTIVATION(both[i]).to(a.dtype)
            tma.store_wait(1)
            stage_and_store(value, a, end, row, column + i * PIECE, a_smem, PIECE)
        now = then


@gluon.jit
def _consumer(
    z, z_scale, num_rows, a, b1, tiles, total, x_smem, w_smem, out_smem, full, empty,
    CONSUMER: gl.constexpr, H: gl.constexpr, N: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_LAYOUT: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
    KEEP_Z: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its 64 rows of every tile of this program.

    They are stored in pieces of BLOCK_N/4 columns through two buffers, to leave shared memory to
    the ring.
    """
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N // 4, 16]
    )
    step = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        acc, step, expert, end, row, n = next_tile(
            step, index, tiles, total, x_smem, w_smem, full, empty,
            CONSUMER, H, N, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, GATHER,
        )  # fmt: skip
        if GATE_UP is None and z_scale is not None:
            _store_plain_fp8(
                acc, z, z_scale, num_rows, a, b1, expert, end, row, n, out_smem,
                CONSUMER, N, BLOCK_N, ACTIVATION, L,
            )  # fmt: skip
        elif GATE_UP is None:
            _store_plain(
                acc, z, a, b1, expert, end, row, n, out_smem,
                CONSUMER, N, BLOCK_N, ACTIVATION, KEEP_Z, L,
            )  # fmt: skip
        else:
            _store_gated(
                acc, z, z_scale, num_rows, a, b1, expert, end, row, n, out_smem,
                CONSUMER, N, BLOCK_N, GATE_UP, ACTIVATION, KEEP_Z, L,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def hopper_up_kernel(
    x, row_token, w1, lora_u, lora_b, b1, z, z_scale, a, tiles, num_rows,
    H: gl.constexpr, N: gl.constexpr, RANK: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WEIGHT_LAYOUT: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
    KEEP_Z: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Z = X W1ᵀ + b1, with LoRA X W1ᵀ + U Bᵀ + b1, and A = act(Z); Z is stored if KEEP_Z.

    GATE_UP and `z_scale` are as in `triton.gemm.up_kernel`. Rows of X are gathered if GATHER.

    Grid: one program per SM; each owns the tiles of Z and A that it writes.
    """
    x_smem = gl.allocate_shared_memory(
        a.dtype,
        [2 * STAGES, CONSUMER_M, BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_M, BLOCK_K], a.dtype),
    )
    w_smem = weight_ring(w1, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, GATE_UP)
    PIECE: gl.constexpr = BLOCK_N // 4
    out_smem = gl.allocate_shared_memory(
        a.dtype,
        [4, CONSUMER_M, PIECE],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_M, PIECE], a.dtype),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ARRIVALS: gl.constexpr = 129 if GATHER else 1  # TMA, and each of the producer's 128 threads
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)
    total = gl.load(tiles) * ((N + BLOCK_N - 1) // BLOCK_N)
    gl.warp_specialize(
        [
            (_consumer, (
                z, z_scale, num_rows, a, b1, tiles, total,
                x_smem, w_smem, out_smem, full, empty,
                0, H, N, RANK, BLOCK_N, BLOCK_K, STAGES,
                WEIGHT_LAYOUT, GATE_UP, ACTIVATION, KEEP_Z, GATHER,
            )),
            (_consumer, (
                z, z_scale, num_rows, a, b1, tiles, total,
                x_smem, w_smem, out_smem, full, empty,
                1, H, N, RANK, BLOCK_N, BLOCK_K, STAGES,
                WEIGHT_LAYOUT, GATE_UP, ACTIVATION, KEEP_Z, GATHER,
            )),
            (producer, (
                x, row_token, w1, lora_u, lora_b, tiles, total, x_smem, w_smem, full, empty,
                H, N, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, GATE_UP, GATHER,
            )),
        ],
        [4, 4 if GATHER else 1],
        [224, 56],
    )  # fmt: skip
