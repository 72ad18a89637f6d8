"""TMA loads and stores of row boxes that the hardware cuts off at an expert's last row.

Loads give zeros past the expert's end, stores drop what lies past it. For that the descriptor has
two outer dimensions before (rows, columns), and rows are counted from 2³⁰. The strides of the outer
dimensions cancel modulo 2⁶⁴ when the first coordinate is 2³⁰, and the bound on the row dimension
falls on the expert's end. `launch.boxes.ragged_boxes` makes such descriptors.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import copy_in, copy_out

ORIGIN = gl.constexpr(1 << 30)


@gluon.jit
def load_rows(descriptor, end, row, column, barrier, smem):
    """Load rows from `row` on into shared memory; zeros from the expert's `end` on."""
    copy_in(descriptor, [ORIGIN, end, ORIGIN - end + row, column], barrier, smem)


@gluon.jit
def load_rows_of_half(descriptor, end, row, half, column, barrier, smem):
    """`load_rows` from the gate (0) or up (1) half of concatenated rows."""
    copy_in(descriptor, [ORIGIN, end, ORIGIN - end + row, half, column], barrier, smem)


@gluon.jit
def store_rows(descriptor, end, row, column, smem):
    """Store shared memory to rows from `row` on, up to the expert's `end`."""
    copy_out(descriptor, [ORIGIN, end, ORIGIN - end + row, column], smem)


@gluon.jit
def store_rows_of_half(descriptor, end, row, half, column, smem):
    """`store_rows` to the gate (0) or up (1) half; columns past the half are dropped."""
    copy_out(descriptor, [ORIGIN, end, ORIGIN - end + row, half, column], smem)
