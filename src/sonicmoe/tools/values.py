"""Inputs of a layer with values like those of trained models, made from Gaussian ones.

Every distribution works at any size: where one expert, token or channel is larger, there is one,
even if it is the only one.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import bad_argument
from . import trained_weights


class Tensors(NamedTuple):
    """Gaussian inputs of order one in fp32: the rows of W1 and W2 have norms of about one."""

    x: torch.Tensor  # (T, H)
    w1: torch.Tensor  # (E, N, H)
    w2: torch.Tensor  # (E, H, I)
    dout: torch.Tensor  # (T, H)
    scores: torch.Tensor  # (T, K)


Shape = Callable[[Tensors, torch.Generator], Tensors]


def shaped(name: str, tensors: Tensors, generator: torch.Generator) -> Tensors:
    """New tensors with the distribution `name`, one of `VALUES`.

    Works for any sizes, strides and order of gate and up. Random positions and factors come from
    `generator`, which is on the device of the tensors.
    """
    if name not in _SHAPES:
        raise bad_argument("values", f"one of {', '.join(VALUES)}", repr(name), "Choose one.")
    return _SHAPES[name](tensors, generator)


# --- outliers -------------------------------------------------------------------------------------
def _gaussian(tensors: Tensors, generator: torch.Generator) -> Tensors:
    return tensors


def _rows(factor: float, which: tuple[str, ...] = ("w1", "w2")) -> Shape:
    """One row of W1 and of W2 in every expert, each expert its own."""

    def shape(tensors: Tensors, generator: torch.Generator) -> Tensors:
        for name in which:
            weight = getattr(tensors, name)
            row = _one_of(weight.shape[1], (len(weight), 1), generator)
            every = torch.arange(weight.shape[1], device=row.device)
            larger = torch.where(every == row, factor, 1.0)
            tensors = tensors._replace(**{name: weight * larger[..., None]})
        return tensors

    return shape


def _channels(factor: float) -> Shape:
    """One input channel, in X and in W1 of every expert, and one output channel of dO."""

    def shape(tensors: Tensors, generator: torch.Generator) -> Tensors:
        into, out = _one_of(tensors.x.shape[1], (2,), generator).tolist()
        return tensors._replace(
            x=_times_column(tensors.x, into, factor),
            w1=_times_column(tensors.w1, into, factor),
            dout=_times_column(tensors.dout, out, factor),
        )

    return shape


def _weights(factor: float) -> Shape:
    """One weight of W1 and of W2 in every expert, each expert its own.

    It is `factor` times the root mean square: a weight near zero would not become an outlier.
    """

    def shape(tensors: Tensors, generator: torch.Generator) -> Tensors:
        for name in ("w1", "w2"):
            weight = getattr(tensors, name)
            flat = weight.reshape(len(weight), -1).clone()
            place = _one_of(flat.shape[1], (len(flat), 1), generator)
            large = factor * _root_mean_square(weight)
            flat.scatter_(1, place, large.copysign(flat.gather(1, place)))
            tensors = tensors._replace(**{name: flat.view(weight.shape)})
        return tensors

    return shape


def _one_of(count: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(count, shape, generator=generator, device=generator.device)


def _times_column(t: torch.Tensor, column: int, factor: float) -> torch.Tensor:
    t = t.clone()
    t[..., column] *= factor
    return t


# --- magnitudes -----------------------------------------------------------------------------------
def _tokens(smallest: int, largest: int) -> Shape:
    """Gradients of tokens times powers of two with exponents in this range, both ends included."""

    def shape(tensors: Tensors, generator: torch.Generator) -> Tensors:
        tokens = len(tensors.dout)
        power = _one_of(largest - smallest + 1, (tokens,), generator) + smallest
        order = torch.randperm(tokens, generator=generator, device=generator.device)
        power[order[:1]], power[order[1:2]] = smallest, largest
        return tensors._replace(dout=tensors.dout * power.float().exp2()[:, None])

    return shape


def _log_normal(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """Every row and column of its own magnitude; the mean square stays what it was."""

    def factors(*shape: int, sigma: float = 0.7) -> torch.Tensor:
        normal = torch.randn(shape, generator=generator, device=generator.device)
        return (sigma * normal - sigma**2).exp()

    x, w1, w2, dout, _ = tensors
    (e, n, h), i, t = w1.shape, w2.shape[2], len(x)
    return tensors._replace(
        x=x * factors(t, 1) * factors(1, h),
        w1=w1 * factors(e, n, 1) * factors(e, 1, h),
        w2=w2 * factors(e, h, 1) * factors(e, 1, i),
        dout=dout * factors(t, 1, sigma=1.0),
    )


def _scaled(x: int, weights: int, dout: int) -> Shape:
    """All values times powers of two with these exponents.

    With a gate Z has the exponent x + weights and A twice that. The gradient of a score, the result
    farthest from one, has dout + 2·x + 3·weights: −92 and 74, well within bf16 and fp32.
    """

    def shape(tensors: Tensors, generator: torch.Generator) -> Tensors:
        return tensors._replace(
            x=tensors.x * 2.0**x,
            w1=tensors.w1 * 2.0**weights,
            w2=tensors.w2 * 2.0**weights,
            dout=tensors.dout * 2.0**dout,
        )

    return shape


def _zero_rows(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """An eighth of the tokens of X and of dO, of the rows of W1 and W2, and of the scores."""

    def keep(*shape: int) -> torch.Tensor:
        """0 for an eighth of the last dimension, one at least and never all; else 1."""
        rank = torch.rand(shape, generator=generator, device=generator.device).argsort(-1)
        zeros = min(max(1, shape[-1] // 8), shape[-1] - 1)
        return (rank >= zeros).float()

    x, w1, w2, dout, scores = tensors
    return Tensors(
        x=x * keep(len(x))[:, None],
        w1=w1 * keep(*w1.shape[:2])[..., None],
        w2=w2 * keep(*w2.shape[:2])[..., None],
        dout=dout * keep(len(dout))[:, None],
        scores=scores * keep(scores.numel()).view(scores.shape),
    )


# --- a trained model ------------------------------------------------------------------------------
def _trained(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """Weights of a real model, repeated or subsampled to the requested sizes.

    Norms of rows and columns keep their distribution, the largest ones included. W1 and W2 are
    scaled as a whole to the mean square of the given ones. Channels of X have the weights of the
    norm before the layer.
    """
    experts = trained_weights.read()
    e, n, h = tensors.w1.shape
    i, gated = tensors.w2.shape[2], n == 2 * tensors.w2.shape[2]
    first = int(_one_of(len(experts), (1,), generator))  # then one after the other
    layer = experts[first]
    w1, w2 = torch.empty_like(tensors.w1), torch.empty_like(tensors.w2)
    channels = trained_weights.shuffled(len(layer.x), h, generator)  # large ones in all experts
    for number in range(e):
        crop = experts[(first + number) % len(experts)]
        neurons = trained_weights.shuffled(crop.w2.shape[1], i, generator)
        outputs = trained_weights.shuffled(len(crop.w2), h, generator)
        rows = torch.stack([2 * neurons, 2 * neurons + 1], 1).flatten() if gated else 2 * neurons
        w1[number] = trained_weights.resized(crop.w1, rows, channels, generator)
        w2[number] = trained_weights.resized(crop.w2, outputs, neurons, generator)
    x = layer.x.float().to(tensors.x.device)[channels]
    return tensors._replace(
        x=tensors.x * (x / x.square().mean().sqrt()),
        w1=w1 * (_root_mean_square(tensors.w1) / _root_mean_square(w1)),
        w2=w2 * (_root_mean_square(tensors.w2) / _root_mean_square(w2)),
    )


def _root_mean_square(t: torch.Tensor) -> torch.Tensor:
    return t.norm() / math.sqrt(t.numel())


_SHAPES: dict[str, Shape] = {
    "gaussian": _gaussian,
    **{f"rows_{factor}": _rows(factor) for factor in (10, 30, 100)},
    "w1_rows_30": _rows(30, ("w1",)),
    "w2_rows_30": _rows(30, ("w2",)),
    **{f"channels_{factor}": _channels(factor) for factor in (10, 30, 100)},
    "weights_300": _weights(300),
    "tokens_2e20": _tokens(-16, 4),  # with 2¹⁰ most of dW1 would overflow in fp16
    "log_normal": _log_normal,
    "tiny": _scaled(x=-8, weights=-12, dout=-40),
    "huge": _scaled(x=8, weights=6, dout=40),
    "zero_rows": _zero_rows,
    "trained": _trained,
}
VALUES = tuple(_SHAPES)
TRAINED = VALUES[1:]  # what --values trained runs
