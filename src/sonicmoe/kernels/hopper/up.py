"""Up on Hopper: Z = X W1ᵀ and A = act(Z) in the epilogue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..quantize import BLOCK_FLOOR, scale_and_inverse
from .consumer import run
from .epilogue import (
    biased,
    even_and_odd,
    halves,
    quarters,
    store_value,
    z_buffer,
)
from .gluon_compat import aggregate
from .ring import CONSUMER_M, accumulator_layout, assume_layout, buffers, make_ring

PRODUCER_REGISTERS = gl.constexpr(56)


@aggregate
class Epilogue:
    """Z = acc + b1 and A = act(Z), in quarters of BLOCK_N/4 columns through two buffers, to leave
    shared memory to the ring."""

    z: tma.tensor_descriptor
    z_scale: gl.tensor | gl.constexpr  # None unless Z is in e4m3
    num_rows: gl.tensor
    a: tma.tensor_descriptor
    b1: gl.tensor | gl.constexpr  # may be None
    smem: gl.shared_memory_descriptor  # two buffers for each consumer
    N: gl.constexpr
    GATE_UP: gl.constexpr
    ACTIVATION: gl.constexpr
    KEEP_Z: gl.constexpr
    ROWS: gl.constexpr

    @gluon.jit
    def apply(self, acc, tile):
        acc = acc.wait()
        L: gl.constexpr = accumulator_layout(acc.shape[1] // 4, self.a.dtype)
        if self.GATE_UP is not None:
            self.store_gated(acc, tile, L)
        elif self.z_scale is not None:
            self.store_plain_e4m3(acc, tile, L)
        else:
            self.store_plain(acc, tile, L)

    @gluon.jit
    def buffer(self, tile, i):
        """Buffer i % 2 of the tile's consumer."""
        return self.smem.index(2 * tile.CONSUMER + i % 2)

    @gluon.jit
    def add_bias(self, z, tile, column, HALF: gl.constexpr = None):
        """Some columns of Z from `column` on, of gates (0) or ups (1) if HALF, plus their bias if
        there is one."""
        N: gl.constexpr = self.N
        if self.b1 is None:
            return z
        elif HALF is None:
            return biased(z, self.b1 + tile.expert * N, column, N)
        else:
            return biased(z, self.b1 + tile.expert * N + HALF * (N // 2), column, N // 2)

    @gluon.jit
    def store_scale(self, amax, tile, block, L: gl.constexpr):
        """Store the scales (64,) of a block of Z, return their inverses (64, 1)."""
        scale, inverse = scale_and_inverse(amax, BLOCK_FLOOR)
        inside = tile.inside() & (block < (self.N + 127) // 128)
        plane = self.z_scale + block * self.num_rows.to(gl.int64)
        gl.store(plane + (tile.row + tile.r), scale, mask=inside)
        return inverse[:, None]

    @gluon.jit
    def store_gated(self, acc, tile, L: gl.constexpr):
        """Store Z (64, BLOCK_N) and A (64, BLOCK_N/2) of a gated activation."""
        CONCATENATED: gl.constexpr = self.GATE_UP == "concatenated"
        GATES: gl.constexpr = 0 if CONCATENATED else None  # halves of Z
        UPS: gl.constexpr = 1 if CONCATENATED else None
        HALF: gl.constexpr = acc.shape[1] // 2
        QUARTER: gl.constexpr = acc.shape[1] // 4
        STORES: gl.constexpr = 3 if self.KEEP_Z else 1  # per quarter of A; alternate buffers
        q0, q1, q2, q3 = quarters(acc)
        # Two quarters of Z make QUARTER columns of A: gates and their ups, or two interleaved ones.
        ordered = (q0, q2, q1, q3) if CONCATENATED else (q0, q1, q2, q3)
        for i in gl.static_range(2):
            g_column = tile.n * HALF + i * QUARTER
            u_column = g_column
            if not CONCATENATED:
                g_column = tile.n * acc.shape[1] + 2 * i * QUARTER
                u_column = g_column + QUARTER
            g = self.add_bias(assume_layout(ordered[2 * i], L), tile, g_column, GATES)
            u = self.add_bias(assume_layout(ordered[2 * i + 1], L), tile, u_column, UPS)
            if CONCATENATED:
                value = self.ACTIVATION(g, u).to(self.a.dtype)
            else:
                g0, u0 = even_and_odd(g)
                g1, u1 = even_and_odd(u)
                v0 = self.ACTIVATION(g0, u0).to(self.a.dtype)
                v1 = self.ACTIVATION(g1, u1).to(self.a.dtype)
                value = gl.reshape(gl.permute(gl.join(v0, v1), (0, 2, 1)), (CONSUMER_M, QUARTER))
                value = gl.convert_layout(value, L)
            first_smem = self.buffer(tile, i * STORES)
            if self.KEEP_Z:
                if self.z_scale is not None:  # BLOCK_N is 256, so these quarters are one block
                    amax = gl.maximum(gl.max(gl.abs(g), 1), gl.max(gl.abs(u), 1))
                    inverse = self.store_scale(amax, tile, 2 * tile.n + i, L)
                    g = g * inverse
                    u = u * inverse
                g_smem = z_buffer(self.z, first_smem)
                u_smem = z_buffer(self.z, self.buffer(tile, i * STORES + 1))
                tma.store_wait(1)
                store_value(g.to(self.z.dtype), self.z, tile, g_column, g_smem, GATES)
                tma.store_wait(1)
                store_value(u.to(self.z.dtype), self.z, tile, u_column, u_smem, UPS)
            tma.store_wait(1)
            store_value(value, self.a, tile, tile.n * HALF + i * QUARTER, first_smem)

    @gluon.jit
    def store_plain(self, acc, tile, L: gl.constexpr):
        """Store Z and A, both (64, BLOCK_N), of an activation without a gate."""
        QUARTER: gl.constexpr = acc.shape[1] // 4
        of_z = quarters(acc)
        for i in gl.static_range(4):
            column = tile.n * acc.shape[1] + i * QUARTER
            z = self.add_bias(assume_layout(of_z[i], L), tile, column)
            if self.KEEP_Z:
                tma.store_wait(1)
                store_value(z.to(self.z.dtype), self.z, tile, column, self.buffer(tile, 0))
            value = self.ACTIVATION(z).to(self.a.dtype)
            tma.store_wait(1)
            store_value(value, self.a, tile, column, self.buffer(tile, 1 if self.KEEP_Z else i))

    @gluon.jit
    def store_plain_e4m3(self, acc, tile, L: gl.constexpr):
        """`store_plain` with Z in e4m3. BLOCK_N is 256, so half of it is one block."""
        QUARTER: gl.constexpr = acc.shape[1] // 4
        z_smem = z_buffer(self.z, self.buffer(tile, 0))
        a_smem = self.buffer(tile, 1)
        now, then = halves(acc)
        for block in range(2):  # not unrolled: GELU of both halves at once spills 24 registers
            column = tile.n * acc.shape[1] + 2 * block * QUARTER
            left, right = halves(now)
            left = self.add_bias(assume_layout(left, L), tile, column)
            right = self.add_bias(assume_layout(right, L), tile, column + QUARTER)
            amax = gl.maximum(gl.max(gl.abs(left), 1), gl.max(gl.abs(right), 1))
            inverse = self.store_scale(amax, tile, 2 * tile.n + block, L)
            both = (left, right)
            for i in gl.static_range(2):
                tma.store_wait(1)
                z = (both[i] * inverse).to(self.z.dtype)
                store_value(z, self.z, tile, column + i * QUARTER, z_smem)
                value = self.ACTIVATION(both[i]).to(self.a.dtype)
                tma.store_wait(1)
                store_value(value, self.a, tile, column + i * QUARTER, a_smem)
            now = then


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
    epilogue = Epilogue(
        z=z, z_scale=z_scale, num_rows=num_rows, a=a, b1=b1, smem=smem, N=N, GATE_UP=GATE_UP,
        ACTIVATION=ACTIVATION, KEEP_Z=KEEP_Z,
        ROWS=gl.SliceLayout(1, accumulator_layout(BLOCK_N // 4, a.dtype)),
    )  # fmt: skip
    run(ring, epilogue, x, row_token, w1, lora_u, lora_b, PRODUCER_REGISTERS)
