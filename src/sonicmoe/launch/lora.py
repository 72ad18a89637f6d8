"""Launches of the grouped GEMMs with a LoRA adapter."""

from dataclasses import replace

from ..enums import ActivationType
from ..kernels.activation import value_of
from ..kernels.transpose import transpose_kernel
from ..kernels.triton.gemm import up_kernel
from ..shapes import ceil_div
from ..tuning import RowConfig, Target, row_config
from ..tuning.select import default_row_config
from . import grouped_gemm as products
from . import memory
from .grouped_gemm import Adapter, gate_up_of
from .launcher import dot_precision, launch


def _config(kernel: str, itemsize: int, k: int, n: int, gated: bool, target: Target) -> RowConfig:
    """The layer's configuration for Hopper kernels, else one whose epilogue does not spill."""
    config = row_config(kernel, itemsize, k, n, gated, target)
    if config.hopper:
        return config
    config = default_row_config(kernel, itemsize, k, n, target._replace(gluon=False))
    # With a gate two slices spill up to 18 registers in the clamped activation.
    return replace(config, slices=4 if gated else 2) if kernel == "dz" else config


def up(x, w1, b1, u, factor, row_token, tiles, activation, concatenated):
    """Z and A."""
    n, hidden = w1.shape[1:]
    count = u.shape[0]
    z = memory.empty((count, n), x.dtype, x.device)
    a = memory.empty((count, n // 2 if activation.is_gated else n), x.dtype, x.device)
    if count == 0:
        return z, a
    target = products.target_of(x)
    config = _config("up", x.element_size(), hidden, n, activation.is_gated, target)
    grid = products._grid(config, (tiles.shape[0] - 1) * ceil_div(n, config.block_n), target)
    if config.hopper:
        products._hopper().up(
            x, w1, b1, row_token, z, a, tiles, activation, concatenated, True, config, *grid,
            Adapter(u, factor),
        )  # fmt: skip
        return z, a
    launch(
        up_kernel, grid,
        x, row_token, products._weight_source(w1, config, activation.is_gated and concatenated),
        b1, u, factor.contiguous(), z, a, tiles, *w1.stride(),
        H=hidden, N=n, **Adapter(u, factor).options,
        GATE_UP=gate_up_of(activation, concatenated), ACTIVATION=value_of(activation),
        KEEP_Z=True, A_TMA=False, W_TMA=config.tma, WEIGHT_LAYOUT=products._weight_layout(w1),
        PRECISION=dot_precision(x), UNROLL=products._unroll(x), **products._options(config),
    )  # fmt: skip
    return z, a


def product(kernel, a, w, bias, u, factor, tiles):
    target = products.target_of(a)
    n, k = w.shape[1:]
    config = _config(kernel, a.element_size(), k, n, True, target)
    return products._product(kernel, a, w, bias, None, tiles, config, Adapter(u, factor))


def down_backward(
    dout, z, w2, b2, u, factor, scores, row_token, row_slot, slot_row, expert_start, tiles,
    tile_height, activation: ActivationType, concatenated,
):  # fmt: skip
    """dZ, A' and dscores."""
    hidden, intermediate = w2.shape[1:]
    config = _config(
        "dz", z.element_size(), hidden, intermediate, activation.is_gated,
        products.target_of(z),
    )  # fmt: skip
    return products._score_gradient(
        dout, z, w2, b2, scores, row_token, row_slot, slot_row, expert_start,
        tiles, tile_height, activation, concatenated, True, True, True, config, Adapter(u, factor),
    )  # fmt: skip


def transposed(t, scale, dtype):
    rows, columns = t.shape
    out = memory.empty((columns, rows), dtype, t.device)
    if t.numel():
        launch(
            transpose_kernel, (ceil_div(rows, 64), ceil_div(columns, 64)),
            t, out, scale, rows, columns, BLOCK_P=64, BLOCK_Q=64, num_warps=4,
        )  # fmt: skip
    return out
