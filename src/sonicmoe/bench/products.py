"""The six grouped GEMMs of a layer, each as a function of its kernel configuration."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..tuning import Target
from ..tuning.candidates import default_config
from ..tuning.table import Config, Key, RowKey, WeightKey
from .inputs import Inputs

NAMES = ("up", "down", "dz", "dw2", "dx", "dw1")


@dataclass(frozen=True, slots=True)
class Product:
    """`run` launches the same kernel as a training step and returns everything it computed.

    With None it uses the configuration that the layer would use.
    """

    name: str
    key: Key
    flops: int
    run: Callable[[Config | None], tuple[torch.Tensor, ...]]


def products(inputs: Inputs, concatenated: bool) -> tuple[list[Product], Target]:
    """The GEMMs of one case on its inputs, and the GPU they are tuned for."""
    from ..functional import permute
    from ..launch import grouped_gemm as launches

    p, activation = inputs.case.problem, inputs.case.activation
    x, w1, w2 = inputs.x.detach(), inputs.w1.detach(), inputs.w2.detach()
    b1, b2 = (None if b is None else b.detach() for b in (inputs.b1, inputs.b2))
    dout, scores = inputs.dout, inputs.scores.detach()
    maps = permute(inputs.ids, p.E, dtype=x.dtype, backend="triton")
    where = (maps.expert_start, maps.tiles, maps.tile_height)
    size, target = x.element_size(), launches.target_of(x)

    def up(config):
        return launches.up(
            x, w1, b1, maps.row_token, *where, activation, concatenated, True, config=config
        )

    def dz(config):
        return launches._score_gradient(
            dout, z, w2, b2, scores, maps.row_token, maps.row_slot, maps.slot_row, *where,
            activation, concatenated, True, True, True, config,
        )  # fmt: skip

    def down(config):
        return (launches.down(a, w2, b2, None, *where, False, config=config),)

    def dx(config):
        # As if the rows came sorted: their sum for each token is another kernel's.
        return launches.up_backward(
            dz_rows, x, w1, None, None, None, *where, True, False, False, config=config
        )[:1]

    def dw1(config):
        return launches.up_backward(
            dz_rows, x, w1, maps.row_token, None, None, *where, False, True, False, weights=config
        )[1:2]

    def dw2(config):
        # The same sum over rows, of dO and A': the gradient of a W1 that lies in memory as W2 does.
        return launches.up_backward(
            scaled_a, dout, w2.mT, maps.row_token, None, None, *where, False, True, False,
            weights=config,
        )[1:2]  # fmt: skip

    small, large = 2 * p.R * p.H * p.I, 2 * p.R * p.H * p.N
    gated = activation.is_gated
    found = [
        Product("up", RowKey("up", size, p.H, p.N, gated), large, up),
        Product("down", RowKey("down", size, p.I, p.H, True), small, down),
        Product("dz", RowKey("dz", size, p.H, p.I, gated), small, dz),
        Product("dw2", WeightKey(size, p.H, p.I, True, False), small, dw2),
        Product("dx", RowKey("dx", size, p.N, p.H, True), large, dx),
        Product("dw1", WeightKey(size, p.N, p.H, False, True), large, dw1),
    ]
    z, a = up(default_config(found[0].key, target))
    dz_rows, scaled_a, _ = dz(default_config(found[2].key, target))
    return found, target
