"""Slices of Z in shared memory, for the epilogues of up and of the dZ GEMM.

A slice is SLICE columns of A and the columns of Z that belong to them. A slice of interleaved Z is
one box of 64 columns; of concatenated Z it is a box of gates and one of ups, which take two
buffers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .epilogue import even_and_odd, halves, quarters, store_box, z_buffer
from .gluon_compat import aggregate
from .ragged import load_rows, load_rows_of_half
from .ring import CONSUMER_M, assume_layout, buffers

BUFFERS = gl.constexpr(4)  # slices of Z in flight per consumer warpgroup
SLICE = gl.constexpr(32)  # columns of A in a slice: 128 bytes of an interleaved row of Z
# Layout of a slice of interleaved Z: a thread holds the gates and ups of its two columns of A.
INTERLEAVED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)


@gluon.constexpr_function
def boxes_of_slice(gate_up):
    """TMA copies that move a slice of Z."""
    return 2 if gate_up == "concatenated" else 1


@gluon.jit
def slice_buffers(dtype: gl.constexpr, COUNT: gl.constexpr, GATE_UP: gl.constexpr):
    """Shared memory for COUNT slices of Z."""
    COLUMNS: gl.constexpr = 2 * SLICE if GATE_UP == "interleaved" else SLICE
    return buffers(dtype, COUNT * boxes_of_slice(GATE_UP), [CONSUMER_M, COLUMNS])


@gluon.jit
def read_slice(z, smem, buffer, L: gl.constexpr, GATE_UP: gl.constexpr):
    """Gates and ups of a slice of Z in shared memory; twice Z if there is no gate."""
    if GATE_UP == "interleaved":
        gate, up = even_and_odd(z_buffer(z, smem.index(buffer)).load(INTERLEAVED))
        return assume_layout(gate, L), assume_layout(up, L)
    elif GATE_UP == "concatenated":
        gate = z_buffer(z, smem.index(2 * buffer)).load(L)
        return gate, z_buffer(z, smem.index(2 * buffer + 1)).load(L)
    else:
        both = z_buffer(z, smem.index(buffer)).load(L)
        return both, both


@gluon.jit
def write_slice(gate, up, z, smem, buffer, GATE_UP: gl.constexpr):
    """Write gates and ups of a slice to shared memory; only the gates if there are no ups."""
    gate = gate.to(z.dtype)
    if GATE_UP == "interleaved":
        both = gl.reshape(gl.join(gate, up.to(z.dtype)), (CONSUMER_M, 2 * SLICE))
        z_buffer(z, smem.index(buffer)).store(assume_layout(both, INTERLEAVED))
    elif GATE_UP == "concatenated":
        z_buffer(z, smem.index(2 * buffer)).store(gate)
        z_buffer(z, smem.index(2 * buffer + 1)).store(up.to(z.dtype))
    else:
        z_buffer(z, smem.index(buffer)).store(gate)


@gluon.jit
def store_slice(z, tile, column, smem, buffer, GATE_UP: gl.constexpr):
    """Start the TMA stores of a slice of Z; `column` is that of A."""
    if GATE_UP == "concatenated":
        store_box(z, tile, column, z_buffer(z, smem.index(2 * buffer)), 0)
        store_box(z, tile, column, z_buffer(z, smem.index(2 * buffer + 1)), 1)
    else:
        PER_COLUMN: gl.constexpr = 1 if GATE_UP is None else 2
        store_box(z, tile, PER_COLUMN * column, z_buffer(z, smem.index(buffer)))


# --- the look-ahead of the dZ GEMM ----------------------------------------------------------------
@aggregate
class ZSlices:
    """Slices of Z on their way through shared memory: BUFFERS for each consumer.

    They arrive BUFFERS slices ahead, the first of them under the main loop. What an epilogue makes
    of a slice takes its place and leaves by TMA; the buffer is free again when these stores have
    been waited for.
    """

    source: tma.tensor_descriptor
    smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # barriers
    GATE_UP: gl.constexpr
    LAPS: gl.constexpr  # over the buffers, per tile
    STORES: gl.constexpr  # TMA stores of a slice

    @gluon.jit
    def column(self, tile, slice):
        """The column of A that a slice of the tile starts at."""
        return tile.n * (self.LAPS * BUFFERS * SLICE) + slice * SLICE

    @gluon.jit
    def load(self, tile, column, i):
        """Start the TMA load of the slice at `column` of A into the consumer's buffer i."""
        PER_COLUMN: gl.constexpr = 1 if self.GATE_UP is None else 2  # columns of Z per column of A
        SIZE: gl.constexpr = self.source.dtype.primitive_bitwidth // 8
        buffer = tile.CONSUMER * BUFFERS + i
        barrier = self.full.index(buffer)
        mbarrier.expect(barrier, SIZE * CONSUMER_M * PER_COLUMN * SLICE)
        if self.GATE_UP == "concatenated":
            for half in gl.static_range(2):
                box = z_buffer(self.source, self.smem.index(2 * buffer + half))
                box = box.reshape([1, 1, CONSUMER_M, 1, SLICE])
                load_rows_of_half(self.source, tile.end, tile.row, half, column, barrier, box)
        else:
            box = z_buffer(self.source, self.smem.index(buffer))
            box = box.reshape([1, 1, CONSUMER_M, PER_COLUMN * SLICE])
            load_rows(self.source, tile.end, tile.row, PER_COLUMN * column, barrier, box)

    @gluon.jit
    def load_first(self, tile):
        """Start the loads of a tile's first slices, once all stores of the tile before are done."""
        tma.store_wait(0)
        for i in gl.static_range(BUFFERS):
            self.load(tile, self.column(tile, i), i)

    @gluon.jit
    def walk(self, epilogue, acc, tile, loaded, state):
        """Call `epilogue.slice` for each slice of a tile: it stores the slice, and takes and
        returns the state, which holds sums over the slices so far."""
        now, then = acc, acc
        if self.LAPS == 2:
            now, then = halves(acc)
        # Not unrolled: eight slices for both warpgroups do not fit the instruction cache. Fetching
        # instructions took 79% of the epilogue of the clamped activation.
        for lap in range(self.LAPS):
            slices = quarters(now)
            for i in gl.static_range(BUFFERS):
                column = self.column(tile, lap * BUFFERS + i)
                full = self.full.index(tile.CONSUMER * BUFFERS + i)
                mbarrier.wait(full, tile.count * self.LAPS + lap & 1)
                state = epilogue.slice(slices[i], tile, column, lap, i, loaded, state)
                # Only this slice's stores are still in flight: the buffer before it is free and
                # takes a slice of the next lap. The last buffer is filled during that lap.
                tma.store_wait(self.STORES)
                if lap == 1 if i == 0 else lap + 1 < self.LAPS:
                    self.load(tile, column + (BUFFERS - 1) * SLICE, (i - 1) % BUFFERS)
            now = then
        return state


@gluon.jit
def make_z_slices(
    z, dtype: gl.constexpr, GATE_UP: gl.constexpr, BLOCK_N: gl.constexpr, STORES: gl.constexpr
):
    """Buffers of Z and their barriers; `dtype` is that of the buffers, `z` the descriptor of Z."""
    smem = slice_buffers(dtype, 2 * BUFFERS, GATE_UP)
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=1)
    LAPS: gl.constexpr = BLOCK_N // SLICE // BUFFERS
    return ZSlices(source=z, smem=smem, full=full, GATE_UP=GATE_UP, LAPS=LAPS, STORES=STORES)


@gluon.jit
def derivatives(BACKWARD: gl.constexpr, gate, up, da, GATE_UP: gl.constexpr):
    """A and the gradients of gate and up; the latter is that of Z if there is no gate."""
    if GATE_UP is None:
        value, dgate = BACKWARD(gate, da)
        return value, dgate, dgate
    else:
        return BACKWARD(gate, up, da)
