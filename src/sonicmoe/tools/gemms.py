"""The six grouped GEMMs of a layer, each as a function of its kernel configuration."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..tensors import NO_LORA, DzResults, Weight
from ..tuning import Target
from ..tuning.candidates import default_config
from ..tuning.table import Config, Key, RowKey, WeightKey
from .inputs import Inputs

NAMES = ("up", "down", "dz", "dw2", "dx", "dw1")


@dataclass(frozen=True, slots=True)
class Gemm:
    """`run` launches the same kernel as a training step and returns everything it computed.

    With None it uses the layer's own configuration.
    """

    name: str
    key: Key
    flops: int
    run: Callable[[Config | None], tuple[torch.Tensor, ...]]


def gemms(inputs: Inputs, gate_up: str) -> tuple[list[Gemm], Target]:
    """The GEMMs of one case on its inputs, and the GPU they are tuned for."""
    from ..launch import grouped_gemm as launches
    from ..launch import memory
    from ..layer.run import permute

    problem, activation = inputs.case.problem, inputs.case.activation
    x, w1, w2 = inputs.x.detach(), inputs.w1.detach(), inputs.w2.detach()
    b1, b2 = (None if b is None else b.detach() for b in (inputs.b1, inputs.b2))
    dout, scores = inputs.dout, inputs.scores.detach()
    p = permute(inputs.ids, problem.E, dtype=x.dtype, backend="triton")
    size, target = x.element_size(), launches.target_of(x)
    needs = DzResults(dz=True, dz_t=False, a=True, dscores=True)
    weight1, weight2 = Weight(w1), Weight(w2)

    def up(config):
        return launches.up(x, weight1, b1, NO_LORA, p, activation, gate_up, x.dtype, config)[:2]

    def dz(config):
        return launches.dz(
            dout, z, None, weight2, b2, scores, NO_LORA, p, activation, gate_up, needs, config
        )

    def down(config):
        return (launches.down(a, weight2, b2, None, NO_LORA, p, config),)

    def dx(config):
        return (launches.down(dz_rows, weight1.mT, None, None, NO_LORA, p, config, kernel="dx"),)

    def dw1(config):
        dw = memory.empty_like(w1, w1.dtype)
        launches.write_weight_gradient(dz_rows, x, dw, p, gathered="right", config=config)
        return (dw,)

    def dw2(config):
        dw = memory.empty_like(w2, w2.dtype)
        launches.write_weight_gradient(dout, scaled_a, dw, p, gathered="left", config=config)
        return (dw,)

    small = 2 * problem.R * problem.H * problem.I
    large = 2 * problem.R * problem.H * problem.N
    h, i, n, gated = problem.H, problem.I, problem.N, activation.is_gated
    found = [
        Gemm("up", RowKey("up", size, h, n, gated), large, up),
        Gemm("down", RowKey("down", size, i, h, True), small, down),
        Gemm("dz", RowKey("dz", size, h, i, gated), small, dz),
        Gemm("dw2", WeightKey(size, h, i, True, False), small, dw2),
        Gemm("dx", RowKey("dx", size, n, h, True), large, dx),
        Gemm("dw1", WeightKey(size, n, h, False, True), large, dw1),
    ]
    z, a = up(default_config(found[0].key, target))
    dz_rows, scaled_a, _ = dz(default_config(found[2].key, target))
    return found, target
