"""Up in FP8 on Hopper: Z = X W1ᵀ in bf16; A = act(Z) in e4m3 with a scale for 128 columns of a row.

The main loop is in `ring`. A tile of a gated activation has 128 gates, then their 128 ups, however
W1 lies in memory: the boxes of its descriptor see to that. So a thread holds both columns of each
element of A.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..quantize import scale_and_inverse
from .gluon_compat import reinterpreted
from .ragged import store_rows, store_rows_of_half
from .ring import (
    CONSUMER_M,
    accumulate,
    accumulator_layout,
    finish,
    halves,
    load_work,
    producer,
    quarters,
    rows_of_work,
    weight_ring,
)

BLOCK_K = gl.constexpr(128)
BLOCK_I = gl.constexpr(128)  # columns of A in a tile, which share a scale
SLICE = gl.constexpr(32)  # columns of A for which Z is stored at once
# Layout of interleaved Z: a thread holds the gates and ups of its two columns of A.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)


@gluon.jit
def _side_by_side(left, right):
    """(64, 2C) from two (64, C)."""
    both = gl.permute(gl.join(left, right), (0, 2, 1))
    return gl.reshape(both, (CONSUMER_M, 2 * left.shape[1]))


@gluon.jit
def _store_z(gate, up, z, end, row, column, smem, first, GATE_UP: gl.constexpr):
    """Start the TMA stores of a slice of Z; `column` is that of A."""
    if GATE_UP == "concatenated":
        smem.index(first).store(gate.to(z.dtype))
        smem.index(first + 1).store(up.to(z.dtype))
    elif GATE_UP is None:
        smem.index(first).store(gate.to(z.dtype))
    else:
        both = gl.reshape(gl.join(gate.to(z.dtype), up.to(z.dtype)), (CONSUMER_M, 2 * SLICE))
        smem.index(first).store(gl.convert_layout(both, PAIRS, assert_trivial=True))
    fence_async_shared()
    if GATE_UP == "concatenated":
        for half in gl.static_range(2):
            box = smem.index(first + half).reshape([1, 1, CONSUMER_M, 1, SLICE])
            store_rows_of_half(z, end, row, half, column, box)
    else:
        PER_COLUMN: gl.constexpr = 1 if GATE_UP is None else 2
        box = smem.index(first).reshape([1, 1, CONSUMER_M, PER_COLUMN * SLICE])
        store_rows(z, end, row, PER_COLUMN * column, box)


@gluon.jit
def _tokens(row_token, row, end, r):
    """Token of each of 64 rows; zero past the expert's end."""
    if row_token is None:
        return row + r
    else:
        return gl.load(row_token + row + r, mask=row + r < end, other=0)


@gluon.jit
def _consumer(
    z, a, x_scale, row_token, w_scale, zmax, a_scale, plane, tiles, total,
    x_smem, w_smem, out_smem, full, empty,
    CONSUMER: gl.constexpr, H: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr, KEEP_Z: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its 64 rows of every tile of this program."""
    GATED: gl.constexpr = GATE_UP is not None
    BLOCK_N: gl.constexpr = 2 * BLOCK_I if GATED else BLOCK_I
    PARTS: gl.constexpr = 2 if GATE_UP == "concatenated" else 1  # boxes of Z in a slice
    L: gl.constexpr = accumulator_layout(SLICE, x_smem.dtype)
    ROWS: gl.constexpr = gl.SliceLayout(1, L)
    r = gl.arange(0, CONSUMER_M, ROWS)
    step = 0
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    expert, start, end, number = load_work(tiles, first, total, N, BLOCK_N)
    row, n = rows_of_work(first, start, end, number, H, N, BLOCK_N)
    row += CONSUMER * CONSUMER_M
    token = _tokens(row_token, row, end, r)
    for index in range(first, total, stride):
        later = index + stride
        next_expert, start, next_end, number = load_work(tiles, later, total, N, BLOCK_N)
        inside = row + r < end
        scale = gl.load(x_scale + token, mask=inside, other=0.0) * gl.load(w_scale + expert)
        acc, step = accumulate(
            step, x_smem, w_smem, full, empty, CONSUMER,
            H, 0, BLOCK_N, BLOCK_K, STAGES, "nk", row_token is not None,
        )  # fmt: skip
        next_row, next_n = rows_of_work(later, start, next_end, number, H, N, BLOCK_N)
        next_row += CONSUMER * CONSUMER_M
        token = _tokens(row_token, next_row, next_end, r)
        acc = finish(acc, step, empty, STAGES)
        if GATED:
            gates, ups = halves(acc)
        else:
            gates, ups = acc, acc
        gate = quarters(gates)
        up = quarters(ups)
        values = ()
        largest = gl.zeros((CONSUMER_M,), gl.float32, ROWS)
        for i in gl.static_range(4):
            g = gl.convert_layout(gate[i], L, assert_trivial=True) * gl.expand_dims(scale, 1)
            u = g
            if GATED:
                u = gl.convert_layout(up[i], L, assert_trivial=True) * gl.expand_dims(scale, 1)
                values = values + (ACTIVATION(g, u),)
            else:
                values = values + (ACTIVATION(g),)
            if KEEP_Z:
                magnitude = gl.maximum(gl.abs(g), gl.abs(u)) if GATED else gl.abs(g)
                largest = gl.maximum(largest, gl.max(magnitude, 1))
                # The buffer of two slices ago is free; before the first slice, that of A too.
                tma.store_wait(PARTS if i > 0 else 0)
                _store_z(
                    g, u, z, end, row, n * BLOCK_I + i * SLICE, out_smem,
                    (2 * CONSUMER + i % 2) * PARTS, GATE_UP,
                )  # fmt: skip
        value = _side_by_side(
            _side_by_side(values[0], values[1]), _side_by_side(values[2], values[3])
        )
        value = gl.convert_layout(
            value, accumulator_layout(BLOCK_I, x_smem.dtype), assert_trivial=True
        )
        amax = gl.convert_layout(gl.max(gl.abs(value), 1), ROWS, assert_trivial=True)
        block_scale, inverse = scale_and_inverse(amax)
        inverse = gl.convert_layout(
            inverse, gl.SliceLayout(1, value.type.layout), assert_trivial=True
        )
        quantized = (value * gl.expand_dims(inverse, 1)).to(a.dtype)
        # A takes the place of a slice of Z: of the one before the last, or of both if plain.
        tma.store_wait(PARTS if KEEP_Z and GATED else 0)
        BUFFERS: gl.constexpr = 4 if GATED else 2
        SHAPE: gl.constexpr = [BUFFERS, 1, 1, CONSUMER_M, BLOCK_I]
        LAYOUT: gl.constexpr = a.layout
        staged = reinterpreted(out_smem, a.dtype, SHAPE, LAYOUT)
        staged = staged.index(CONSUMER * (BUFFERS // 2))
        staged.reshape([CONSUMER_M, BLOCK_I]).store(quantized)
        fence_async_shared()
        store_rows(a, end, row, n * BLOCK_I, staged)
        place = n * plane.to(gl.int64) + row + r
        gl.store(a_scale + place, block_scale, mask=inside)
        if KEEP_Z:
            gl.store(zmax + place, largest, mask=inside)
        expert, row, end, n = next_expert, next_row, next_end, next_n
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["plane"])
def fp8_up_kernel(
    x, row_token, w1, x_scale, w_scale, z, zmax, a, a_scale, plane, tiles,
    H: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr, KEEP_Z: gl.constexpr,
):  # fmt: skip
    """Z = X W1ᵀ and A = act(Z); the largest |Z| and the scale of A (⌈I/128⌉, plane) by row.

    Z and zmax are stored if KEEP_Z. Rows of X are gathered if there is a row_token.

    Grid: one program per SM; each owns the tiles of Z and A that it writes.
    """
    GATED: gl.constexpr = GATE_UP is not None
    BLOCK_N: gl.constexpr = 2 * BLOCK_I if GATED else BLOCK_I
    PARTS: gl.constexpr = 2 if GATE_UP == "concatenated" else 1
    Z_COLUMNS: gl.constexpr = 2 * SLICE if GATE_UP == "interleaved" else SLICE
    GATHER: gl.constexpr = row_token is not None
    WEIGHTS: gl.constexpr = "concatenated" if GATED else None  # how the producer loads a tile
    x_smem = gl.allocate_shared_memory(
        a.dtype,
        [2 * STAGES, CONSUMER_M, BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_M, BLOCK_K], a.dtype),
    )
    w_smem = weight_ring(w1, BLOCK_N, BLOCK_K, STAGES, "nk", WEIGHTS)
    out_smem = gl.allocate_shared_memory(
        z.dtype,
        [4 * PARTS, CONSUMER_M, Z_COLUMNS],
        gl.NVMMASharedLayout.get_default_for([CONSUMER_M, Z_COLUMNS], z.dtype),
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
                z, a, x_scale, row_token, w_scale, zmax, a_scale, plane, tiles, total,
                x_smem, w_smem, out_smem, full, empty,
                0, H, N, STAGES, GATE_UP, ACTIVATION, KEEP_Z,
            )),
            (_consumer, (
                z, a, x_scale, row_token, w_scale, zmax, a_scale, plane, tiles, total,
                x_smem, w_smem, out_smem, full, empty,
                1, H, N, STAGES, GATE_UP, ACTIVATION, KEEP_Z,
            )),
            (producer, (
                x, row_token, w1, None, None, tiles, total, x_smem, w_smem, full, empty,
                H, N, 0, BLOCK_N, BLOCK_K, STAGES, "nk", WEIGHTS, GATHER,
            )),
        ],
        [4, 4 if GATHER else 1],
        [224, 56],
    )  # fmt: skip
