"""Launches of the products with an adapter."""

from dataclasses import replace

import torch

from ..kernels import adapted
from ..shapes import ceil_div
from ..tuning import RowConfig, Target
from ..tuning.select import default_row_config
from . import launch_products as products
from . import memory
from .launch import aligned, dot_precision, launch


def _config(kernel: str, t: torch.Tensor, k: int, n: int, target: Target, wide: bool) -> RowConfig:
    """Plain Triton's on every device: the Hopper kernels know no second product.

    On Hopper `wide` tiles, with which docs/log.md measured plain Triton, where no epilogue spills.
    """
    if target.arch == 90 and t.element_size() == 2 and n >= 256 and wide:
        return RowConfig(128, 256, 64, warps=8, stages=3, tma=True)
    return default_row_config(kernel, t.element_size(), k, n, False, replace(target, gluon=False))


def _options(config: RowConfig, t: torch.Tensor, w: torch.Tensor, rank: int) -> dict:
    return dict(
        RANK=rank, BR=16 if rank <= 16 and t.element_size() == 2 else 32, B_TMA=config.tma,
        B_KN=products._stored_transposed(w), PRECISION=dot_precision(t),
        UNROLL=products._unroll(t), **products._options(config),
    )  # fmt: skip


def up(
    x, w1, b1, u, factor, row_token, expert_start, tiles, tile_height, activation, concatenated
):  # fmt: skip
    """Z and A."""
    x, w1 = aligned(x), aligned(w1)
    n, hidden = w1.shape[1:]
    count = u.shape[0]
    z = memory.empty((count, n), x.dtype, x.device)
    a = memory.empty((count, n // 2 if activation.is_gated else n), x.dtype, x.device)
    if count == 0:
        return z, a
    target = products.target_of(x)
    config = _config("up", x, hidden, n, target, wide=activation.is_gated)
    launch(
        adapted.adapted_up_kernel,
        products._grid(config, (tiles.shape[0] - 1) * ceil_div(n, config.block_n), target),
        x, row_token, products._weight_source(w1, config, activation.is_gated and concatenated),
        b1, u, factor, z, a, tiles, *w1.stride(),
        H=hidden, N=n, GATED=activation.is_gated, CONCATENATED=concatenated,
        ACTIVATION=products._value(activation), A_TMA=False,
        **_options(config, x, w1, u.shape[1]),
    )  # fmt: skip
    return z, a


def product(a, w, bias, u, factor, expert_start, tiles, tile_height):
    a, w = aligned(a), aligned(w)
    n, k = w.shape[1:]
    y = memory.empty((a.shape[0], n), a.dtype, a.device)
    if a.shape[0] == 0:
        return y
    target = products.target_of(a)
    config = _config("down", a, k, n, target, wide=True)
    source, a_tma = products._row_source(a, config, None)
    launch(
        adapted.adapted_product_kernel,
        products._grid(config, (tiles.shape[0] - 1) * ceil_div(n, config.block_n), target),
        source, products._weight_source(w, config), bias, u, factor, y, tiles, *w.stride(),
        K=k, N=n, A_TMA=a_tma, **_options(config, a, w, u.shape[1]),
    )  # fmt: skip
    return y


def down_backward(
    dout, z, w2, b2, u, factor, scores, row_token, row_slot, slot_row, expert_start, tiles,
    tile_height, activation, concatenated,
):  # fmt: skip
    """dZ, A' and dscores."""
    dout, w2t = aligned(dout), aligned(w2).mT  # the product contracts over H: (E, I, H) weights
    intermediate, hidden = w2t.shape[1:]
    count, slots, device = z.shape[0], scores.numel(), z.device
    dz = memory.empty(z.shape, z.dtype, device)
    a = memory.empty((count, intermediate), z.dtype, device)
    dscores = memory.empty(scores.shape, torch.float32, device)
    if count == 0:
        return dz, a, dscores
    target = products.target_of(z)
    config = _config("score_gradient", z, hidden, intermediate, target, wide=False)
    parts = ceil_div(intermediate, config.block_n)
    planes, plane = parts + (b2 is not None), 4 * ceil_div(slots, 4)
    partial = memory.empty((planes, plane), torch.float32, device)
    launch(
        adapted.adapted_score_gradient_kernel,
        products._grid(config, (tiles.shape[0] - 1) * parts, target),
        dout, row_token, products._weight_source(w2t, config), u, factor, scores, row_slot,
        z, dz, a, partial, tiles, plane, *w2t.stride(),
        H=hidden, I=intermediate, GATED=activation.is_gated, CONCATENATED=concatenated,
        BACKWARD=products._derivative(activation), A_TMA=False,
        # Gate and up take twice the registers: two slices spill up to 18 of them with the clamp.
        SLICES=4 if activation.is_gated else 2,
        **_options(config, z, w2t, u.shape[1]),
    )  # fmt: skip
    products.add_up_scores(
        partial, dscores, dout, b2, row_token, row_slot, slot_row, expert_start, tiles, tile_height
    )
    return dz, a, dscores
