"""The consumer warpgroups of the Hopper GEMMs over rows: wgmma, then an epilogue for each tile.

An epilogue is an aggregate that says what it loads, computes and stores. ROWS is the layout of what
it has one of for each row. The first two of its methods, which return tuples, may be missing:

- `look_up(tile)` loads what leads to the tile's data, such as tokens, one tile ahead
- `before(tile, *looked_up)` starts loads, which then run under the main loop
- `apply(acc, tile, *loaded)` takes the `Accumulator`, computes and stores
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_compat import aggregate
from .ring import CONSUMER_M, Ring, accumulator_layout, assume_layout, ceil_div, producer


@gluon.jit
def _zeros(ring):
    L: gl.constexpr = accumulator_layout(ring.BLOCK_N, ring.a.dtype)
    return gl.zeros((CONSUMER_M, ring.BLOCK_N), gl.float32, L)


@gluon.jit
def _multiply(ring, stage, acc, CONSUMER: gl.constexpr):
    """Start the wgmma that adds a stage's block to the accumulator."""
    if ring.WEIGHT_LAYOUT == "kn":
        w = ring.w.index(stage).reshape([ring.BLOCK_K, ring.BLOCK_N])
    else:
        w = ring.w.index(stage).reshape([ring.BLOCK_N, ring.BLOCK_K]).permute((1, 0))
    return warpgroup_mma(ring.a.index(2 * stage + CONSUMER), w, acc, is_async=True)


@gluon.jit
def _accumulate(ring, step, CONSUMER: gl.constexpr):
    """The accumulator of this consumer's next tile, whose last wgmma is in flight, and the ring
    step after it."""
    BLOCK_K: gl.constexpr = ring.BLOCK_K
    RANK: gl.constexpr = 0 if ring.a.dtype == gl.float8e4nv else ring.RANK
    BLOCKS: gl.constexpr = ceil_div(ring.K, BLOCK_K) + ceil_div(RANK, BLOCK_K)
    acc = _zeros(ring)
    for k in range(0, BLOCKS * BLOCK_K, BLOCK_K):
        stage = ring.stages.wait(step)
        if ring.stages.GATHER:
            fence_async_shared()  # gathered rows were written by cp.async, not by TMA
        acc = _multiply(ring, stage, acc, CONSUMER)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        ring.stages.release_before(step, pred=k > 0)
        step += 1
    return acc, step


@gluon.jit
def _accumulate_scaled(ring, step, epilogue, tile, scale, CONSUMER: gl.constexpr):
    """`_accumulate` of rows with a scale for each block: the accumulator is in units of that of the
    last, which is returned too. Quotients of scales are powers of two: multiplying is exact."""
    BLOCKS: gl.constexpr = ceil_div(ring.K, ring.BLOCK_K)
    acc = _zeros(ring)
    for block in range(BLOCKS):
        stage = ring.stages.wait(step)
        acc = _multiply(ring, stage, acc, CONSUMER)
        following = epilogue.row_scale(tile, gl.minimum(block + 1, BLOCKS - 1))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        ring.stages.release(stage)
        acc *= (scale / following)[:, None]
        scale = following
        step += 1
    return acc, step, scale


@aggregate
class Accumulator:
    """A consumer's accumulator of a tile, (64, BLOCK_N), as the main loop leaves it."""

    ring: Ring
    values: gl.tensor
    step: gl.tensor  # of the ring, after it
    CONSUMER: gl.constexpr

    @gluon.jit
    def wait(self):
        """Its values, once the last wgmma has finished, whose stage is released."""
        acc = self.values
        if not self.ring.BLOCK_SCALES:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            self.ring.stages.release_before(self.step)
        return acc

    @gluon.jit
    def add_low_rank(self, acc):
        """`acc`, the values of e4m3 operands multiplied by their scales, plus U Bᵀ in bf16."""
        ring = self.ring.low_rank()
        step = self.step
        L: gl.constexpr = acc.type.layout
        out = assume_layout(acc, accumulator_layout(ring.BLOCK_N, gl.bfloat16))
        for _ in range(ceil_div(ring.RANK, ring.BLOCK_K)):
            stage = ring.stages.wait(step)
            out = _multiply(ring, stage, out, self.CONSUMER)
            out = warpgroup_mma_wait(0, deps=(out,))
            ring.stages.release(stage)
            step += 1
        return assume_layout(out, L)


@gluon.jit
def consume(CONSUMER: gl.constexpr, epilogue, ring):
    """A consumer warpgroup: its 64 rows of every tile of this program.

    Where the epilogue loads, a tile is located one tile ahead; else under its own last wgmma.
    """
    LOADS: gl.constexpr = hasattr(epilogue, "before")
    LATER: gl.constexpr = ring.RANK if ring.a.dtype == gl.float8e4nv else 0  # columns of U
    r = gl.arange(0, CONSUMER_M, epilogue.ROWS)
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    step = 0
    count = 0 if LOADS else -1  # of tiles before the one that was located last
    if LOADS:
        tile = ring.locate(first, ring.load_entry(first), gl.to_tensor(count), r, CONSUMER)
        looked_up = epilogue.look_up(tile)
    for index in range(first, ring.total, stride):
        ahead = index + stride if LOADS else index
        entry = ring.load_entry(ahead)
        if LOADS:
            loaded = epilogue.before(tile, *looked_up)
        if ring.BLOCK_SCALES:
            acc, step, scale = _accumulate_scaled(ring, step, epilogue, tile, *loaded, CONSUMER)
            loaded = (scale,)
        else:
            acc, step = _accumulate(ring, step, CONSUMER)
        count += 1
        located = ring.locate(ahead, entry, count, r, CONSUMER)
        acc = Accumulator(ring=ring, values=acc, step=step, CONSUMER=CONSUMER)
        step += ceil_div(LATER, ring.BLOCK_K // 2)
        if LOADS:
            looked_up = epilogue.look_up(located)
            epilogue.apply(acc, tile, *loaded)
            tile = located
        else:
            epilogue.apply(acc, located)
    tma.store_wait(0)


@gluon.jit
def run(ring, epilogue, a, row_token, w, lora_u, lora_b, PRODUCER_REGISTERS: gl.constexpr):
    """The warpgroups of a kernel. Operands are those of `producer`; docs/kernels.md has a table for
    the choice of registers."""
    gl.warp_specialize(
        [
            (consume, (0, epilogue, ring)),
            (consume, (1, epilogue, ring)),
            (producer, (ring, a, row_token, w, lora_u, lora_b)),
        ],
        [4, 4 if ring.stages.GATHER else 1],
        [(504 - PRODUCER_REGISTERS) // 2, PRODUCER_REGISTERS],
    )
