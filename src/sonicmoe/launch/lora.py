"""Launches of the grouped GEMMs with a LoRA adapter."""

from dataclasses import replace

from ..enums import ActivationType
from ..kernels.transpose import transpose_kernel
from ..shapes import ceil_div
from ..tuning import RowConfig, Target, row_config
from ..tuning.select import default_row_config
from . import grouped_gemm as products
from . import memory
from .grouped_gemm import Adapter
from .launcher import launch


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
    gated = activation.is_gated
    config = _config("up", x.element_size(), hidden, n, gated, products.target_of(x))
    return products.up(
        x, w1, b1, row_token, None, tiles, None, activation, concatenated, True, config,
        Adapter(u, factor),
    )  # fmt: skip


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
