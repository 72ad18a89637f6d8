"""What the epilogues of the GEMMs share: halves and quarters of a tile, biases, stores by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .gluon_compat import reinterpreted
from .ragged import store_rows, store_rows_of_half
from .ring import CONSUMER_M, assume_layout


@gluon.jit
def halves(x):
    """Left and right half of the columns."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))


@gluon.jit
def quarters(x):
    """Four quarters of the columns, from left to right."""
    left, right = halves(x)
    q0, q1 = halves(left)
    q2, q3 = halves(right)
    return q0, q1, q2, q3


@gluon.jit
def even_and_odd(x):
    """Even and odd columns."""
    return gl.split(gl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@gluon.jit
def biased(x, bias, first, COUNT: gl.constexpr, STRIDE: gl.constexpr = 1, rows=None):
    """`x` plus the bias of its columns, `first` and those after it, of COUNT; zero past them.

    `rows` are ones, and zeros for rows that stay as they are.
    """
    c = first + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    values = gl.load(bias + STRIDE * c, mask=c < COUNT, other=0.0).to(gl.float32)[None, :]
    if rows is None:
        return x + values
    else:
        return x + values * assume_layout(rows, gl.SliceLayout(1, x.type.layout))[:, None]


def _swapped(rows, registers, lanes):
    """Layout of (rows, 32), a quarter of the rows in each warp: what the bits of a thread's
    register and bits 2 to 4 of its lane count, as [row, column]."""
    warps = [[rows // 4, 0], [rows // 2, 0]]
    return gl.constexpr(
        gl.DistributedLinearLayout(registers, [[0, 2], [0, 4], *lanes], warps, [], [rows, 32])
    )


_FIRST = _swapped(32, [[0, 1], [0, 8], [4, 0]], [[1, 0], [2, 0], [0, 16]])
_SECOND = _swapped(16, [[0, 1], [2, 0]], [[1, 0], [0, 8], [0, 16]])
_THIRD = _swapped(8, [[1, 0]], [[0, 1], [0, 8], [0, 16]])


@gluon.jit
def _halve_rows(x):
    """The larger of rows r and r + n of each group of 2n = rows/4 rows."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    upper, lower = gl.split(gl.permute(gl.reshape(x, (4, 2, R // 8, C)), (0, 2, 3, 1)))
    return gl.reshape(gl.maximum(upper, lower), (R // 2, C))


@gluon.jit
def column_maxima(x):
    """The largest of each column of (64, 32) over the rows of a warp: (4, 32).

    At each step a thread sends half of its columns to another, and gets as many rows of the others:
    7 shuffles instead of the 24 of a reduction that leaves every result with every thread.
    """
    x = _halve_rows(x)  # a thread has rows r and r + 8
    x = _halve_rows(gl.convert_layout(x, _FIRST))
    x = _halve_rows(gl.convert_layout(x, _SECOND))
    return _halve_rows(gl.convert_layout(x, _THIRD))


@gluon.jit
def store_box(out, tile, column, smem, HALF: gl.constexpr = None):
    """Start the TMA store of (64, C) to a tile's rows, up to the expert's end.

    HALF is the gate (0) or up (1) half of concatenated rows, whose columns `column` counts.
    """
    if HALF is None:
        box = smem.reshape([1, 1, CONSUMER_M, smem.shape[1]])
        store_rows(out, tile.end, tile.row, column, box)
    else:
        box = smem.reshape([1, 1, CONSUMER_M, 1, smem.shape[1]])
        store_rows_of_half(out, tile.end, tile.row, HALF, column, box)


@gluon.jit
def store_value(value, out, tile, column, smem, HALF: gl.constexpr = None):
    """`store_box` of a value, through shared memory."""
    smem.store(value)
    fence_async_shared()
    store_box(out, tile, column, smem, HALF)


@gluon.jit
def z_buffer(z, smem):
    """Where a box of Z lies in a buffer for 16-bit data: in its first half if Z is in e4m3."""
    if z.dtype == smem.dtype:
        return smem
    else:
        HALVES: gl.constexpr = [2] + z.block_shape
        LAYOUT: gl.constexpr = z.layout
        both = reinterpreted(smem, z.dtype, HALVES, LAYOUT)
        return both.index(0).reshape([CONSUMER_M, smem.shape[1]])
