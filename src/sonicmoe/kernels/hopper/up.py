"""Up on Hopper: Z = X W1ᵀ and A = act(Z) in the epilogue. The main loop is in `ring`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..quantize import BLOCK_FLOOR, scale_and_inverse
from .epilogue import (
    assume_layout,
    biased,
    even_and_odd,
    halves,
    quarters,
    store_value,
    z_buffer,
)
from .gluon_compat import aggregate
from .ring import CONSUMER_M, accumulator_layout, buffers, make_ring, producer


@aggregate
class Epilogue:
    """What a consumer's epilogue reads and writes."""

    z: tma.tensor_descriptor
    z_scale: gl.tensor | gl.constexpr  # None unless Z is in e4m3
    num_rows: gl.tensor
    a: tma.tensor_descriptor
    b1: gl.tensor | gl.constexpr  # may be None
    smem: gl.shared_memory_descriptor  # two buffers for each consumer
    ACTIVATION: gl.constexpr
    KEEP_Z: gl.constexpr


@gluon.jit
def _biased(ring, z, b1, expert, column, HALF: gl.constexpr = None):
    """Some columns of Z from `column` on, of gates (0) or ups (1) if HALF, plus their bias if there
    is one."""
    if b1 is None:
        return z
    elif HALF is None:
        return biased(z, b1 + expert * ring.N, column, ring.N)
    else:
        return biased(z, b1 + expert * ring.N + HALF * (ring.N // 2), column, ring.N // 2)


@gluon.jit
def _store_scale(ring, amax, e, tile, block, L: gl.constexpr):
    """Store the scales (64,) of a block of Z, return their inverses (64, 1)."""
    scale, inverse = scale_and_inverse(amax, BLOCK_FLOOR)
    r = tile.row + gl.arange(0, CONSUMER_M, gl.SliceLayout(1, L))
    inside = (r < tile.end) & (block < (ring.N + 127) // 128)
    gl.store(e.z_scale + block * e.num_rows.to(gl.int64) + r, scale, mask=inside)
    return inverse[:, None]


@gluon.jit
def _store_gated(CONSUMER: gl.constexpr, ring, e, acc, tile, L: gl.constexpr):
    """Store Z (64, BLOCK_N) and A (64, BLOCK_N/2) of a gated activation."""
    CONCATENATED: gl.constexpr = ring.GATE_UP == "concatenated"
    GATES: gl.constexpr = 0 if CONCATENATED else None  # halves of Z
    UPS: gl.constexpr = 1 if CONCATENATED else None
    HALF: gl.constexpr = ring.BLOCK_N // 2
    QUARTER: gl.constexpr = ring.BLOCK_N // 4
    STORES: gl.constexpr = 3 if e.KEEP_Z else 1  # per quarter of A; they alternate between buffers
    q0, q1, q2, q3 = quarters(acc)
    # Two quarters of Z make QUARTER columns of A: gates and their ups, or two interleaved ones.
    if CONCATENATED:
        ordered = (q0, q2, q1, q3)
    else:
        ordered = (q0, q1, q2, q3)
    for i in gl.static_range(2):
        if CONCATENATED:
            g_column = tile.n * HALF + i * QUARTER
            u_column = g_column
        else:
            g_column = tile.n * ring.BLOCK_N + 2 * i * QUARTER
            u_column = g_column + QUARTER
        g = _biased(ring, assume_layout(ordered[2 * i], L), e.b1, tile.expert, g_column, GATES)
        u = _biased(ring, assume_layout(ordered[2 * i + 1], L), e.b1, tile.expert, u_column, UPS)
        if CONCATENATED:
            value = e.ACTIVATION(g, u).to(e.a.dtype)
        else:
            g0, u0 = even_and_odd(g)
            g1, u1 = even_and_odd(u)
            v0 = e.ACTIVATION(g0, u0).to(e.a.dtype)
            v1 = e.ACTIVATION(g1, u1).to(e.a.dtype)
            value = gl.reshape(gl.permute(gl.join(v0, v1), (0, 2, 1)), (CONSUMER_M, QUARTER))
            value = gl.convert_layout(value, L)
        first_smem = e.smem.index(2 * CONSUMER + i * STORES % 2)
        second_smem = e.smem.index(2 * CONSUMER + (i * STORES + 1) % 2)
        if e.KEEP_Z:
            if e.z_scale is not None:  # BLOCK_N is 256, so these quarters are one block
                amax = gl.maximum(gl.max(gl.abs(g), 1), gl.max(gl.abs(u), 1))
                inverse = _store_scale(ring, amax, e, tile, 2 * tile.n + i, L)
                g = g * inverse
                u = u * inverse
            g_smem = z_buffer(e.z, first_smem)
            u_smem = z_buffer(e.z, second_smem)
            tma.store_wait(1)
            store_value(g.to(e.z.dtype), e.z, tile, g_column, g_smem, GATES)
            tma.store_wait(1)
            store_value(u.to(e.z.dtype), e.z, tile, u_column, u_smem, UPS)
        tma.store_wait(1)
        store_value(value, e.a, tile, tile.n * HALF + i * QUARTER, first_smem)


@gluon.jit
def _store_plain(CONSUMER: gl.constexpr, ring, e, acc, tile, L: gl.constexpr):
    """Store Z and A, both (64, BLOCK_N), of an activation without a gate."""
    QUARTER: gl.constexpr = ring.BLOCK_N // 4
    of_z = quarters(acc)
    for i in gl.static_range(4):
        column = tile.n * ring.BLOCK_N + i * QUARTER
        z = _biased(ring, assume_layout(of_z[i], L), e.b1, tile.expert, column)
        if e.KEEP_Z:
            tma.store_wait(1)
            store_value(z.to(e.z.dtype), e.z, tile, column, e.smem.index(2 * CONSUMER))
        value = e.ACTIVATION(z).to(e.a.dtype)
        tma.store_wait(1)
        a_smem = e.smem.index(2 * CONSUMER + (1 if e.KEEP_Z else i % 2))
        store_value(value, e.a, tile, column, a_smem)


@gluon.jit
def _store_plain_fp8(CONSUMER: gl.constexpr, ring, e, acc, tile, L: gl.constexpr):
    """`_store_plain` with Z in e4m3. BLOCK_N is 256, so half of it is one block."""
    QUARTER: gl.constexpr = ring.BLOCK_N // 4
    z_smem = z_buffer(e.z, e.smem.index(2 * CONSUMER))
    a_smem = e.smem.index(2 * CONSUMER + 1)
    now, then = halves(acc)
    for block in range(2):  # not unrolled: GELU of both halves at once spills 24 registers
        column = tile.n * ring.BLOCK_N + 2 * block * QUARTER
        left, right = halves(now)
        left = _biased(ring, assume_layout(left, L), e.b1, tile.expert, column)
        right = _biased(ring, assume_layout(right, L), e.b1, tile.expert, column + QUARTER)
        amax = gl.maximum(gl.max(gl.abs(left), 1), gl.max(gl.abs(right), 1))
        inverse = _store_scale(ring, amax, e, tile, 2 * tile.n + block, L)
        both = (left, right)
        for i in gl.static_range(2):
            tma.store_wait(1)
            z = (both[i] * inverse).to(e.z.dtype)
            store_value(z, e.z, tile, column + i * QUARTER, z_smem)
            value = e.ACTIVATION(both[i]).to(e.a.dtype)
            tma.store_wait(1)
            store_value(value, e.a, tile, column + i * QUARTER, a_smem)
        now = then


@gluon.jit
def _consumer(CONSUMER: gl.constexpr, e, ring):
    """A consumer warpgroup: its 64 rows of every tile of this program.

    They are stored in quarters of BLOCK_N/4 columns through two buffers, to leave shared memory to
    the ring.
    """
    L: gl.constexpr = accumulator_layout(ring.BLOCK_N // 4, e.a.dtype)
    step = 0
    for index in range(gl.program_id(0), ring.total, gl.num_programs(0)):
        acc, step, tile = ring.next_tile(step, index, CONSUMER)
        if ring.GATE_UP is not None:
            _store_gated(CONSUMER, ring, e, acc, tile, L)
        elif e.z_scale is not None:
            _store_plain_fp8(CONSUMER, ring, e, acc, tile, L)
        else:
            _store_plain(CONSUMER, ring, e, acc, tile, L)
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
    ring = make_ring(
        a.dtype, w1, tiles, H, N, RANK, BLOCK_N, BLOCK_K, STAGES, WEIGHT_LAYOUT, GATE_UP, GATHER
    )
    smem = buffers(a.dtype, 4, [CONSUMER_M, BLOCK_N // 4])
    epilogue = Epilogue(z, z_scale, num_rows, a, b1, smem, ACTIVATION, KEEP_Z)
    gl.warp_specialize(
        [
            (_consumer, (0, epilogue, ring)),
            (_consumer, (1, epilogue, ring)),
            (producer, (ring, x, row_token, w1, lora_u, lora_b)),
        ],
        [4, 4 if GATHER else 1],
        [224, 56],
    )
