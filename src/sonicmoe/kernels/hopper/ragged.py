"""Boxes of rows that end where an expert ends, cut off by the copy engine itself.

Two outer dimensions are put before (rows, columns), and rows are counted from 2³⁰: their strides
cancel modulo 2⁶⁴ when the first coordinate is 2³⁰, and the bound on the row dimension falls on the
expert's end. Loads give zeros past it, stores drop what lies past it. `ops.launch_hopper.row_boxes`
makes the matching descriptor.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import copy_in, copy_out

ORIGIN = gl.constexpr(1 << 30)


@gluon.jit
def load_rows(descriptor, end, row, column, barrier, smem):
    """Rows row.. of an expert that ends at `end` into shared memory, zeros past it."""
    copy_in(descriptor, [ORIGIN, end, ORIGIN - end + row, column], barrier, smem)


@gluon.jit
def load_rows_of_half(descriptor, end, row, half, column, barrier, smem):
    """The same for rows of two halves, gates and ups."""
    copy_in(descriptor, [ORIGIN, end, ORIGIN - end + row, half, column], barrier, smem)


@gluon.jit
def store_rows(descriptor, end, row, column, smem):
    """Shared memory into rows row.. of an expert that ends at `end`."""
    copy_out(descriptor, [ORIGIN, end, ORIGIN - end + row, column], smem)


@gluon.jit
def store_rows_of_half(descriptor, end, row, half, column, smem):
    """The same for rows of two halves; what passes a half's columns is dropped."""
    copy_out(descriptor, [ORIGIN, end, ORIGIN - end + row, half, column], smem)
