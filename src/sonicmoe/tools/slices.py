"""Errors of single tokens, rows and columns, which the norm of a whole tensor hides.

The output and dX are judged by token, dW1 by row and dW2 by column: one scale, one sum or one
outlier can spoil such a slice.
"""

from typing import NamedTuple

import torch

# The dimension that a slice runs along; the others count the slices.
ALONG = {"out": -1, "x": -1, "w1": -1, "w2": -2}
NAMES = {"out": "token", "x": "token", "w1": "row", "w2": "column"}
QUANTILES = {0.5: "median", 0.9: "90th percentile"}
# If a larger share of slices overflows in plain PyTorch, the others are too few to compare.
MAX_SKIPPED = 0.5
# A result that is nearly the largest number of its dtype may overflow by its rounding error.
NEARLY = 0.99


class Slices(NamedTuple):
    """Relative errors of S slices against fp64, ours and plain PyTorch's.

    `judged` leaves out slices that overflow in plain PyTorch, or whose exact values do. A slice
    that is exactly zero has the error 0 or infinity, and is no part of the quantiles.
    """

    ours: torch.Tensor  # (S,) fp64
    plain: torch.Tensor  # (S,) fp64
    judged: torch.Tensor  # (S,) bool
    zero: torch.Tensor  # (S,) bool

    @classmethod
    def cat(cls, parts: "list[Slices]") -> "Slices":
        return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @property
    def skipped(self) -> int:
        return int((~self.judged).sum())

    @property
    def comparable(self) -> bool:
        return self.skipped <= MAX_SKIPPED * len(self.judged)

    def quantiles(self) -> list[tuple[float, float]]:
        """(ours, plain PyTorch's) for each of `QUANTILES`, of the slices that are not zero."""
        kept = self.judged & ~self.zero
        if not kept.any():  # zeros that are not exact are counted by `wrong`
            return [(0.0, 0.0)] * len(QUANTILES)
        ours, plain = (_quantiles(errors[kept]) for errors in (self.ours, self.plain))
        return list(zip(ours, plain, strict=True))

    def wrong(self) -> int:
        """Number of slices that must be exactly zero and are not, or that overflow only in ours."""
        return int((self.judged & self.ours.isinf()).sum())


def slices(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, along: int) -> Slices:
    """Errors of the slices along a dimension; `exact` is in fp64."""
    size = exact.norm(dim=along)
    overflow = ~plain.isfinite().all(along)
    overflow |= exact.abs().amax(along) > NEARLY * torch.finfo(plain.dtype).max
    ours, rough = (errors_by_slice(t, exact, along).flatten() for t in (got, plain))
    return Slices(ours, rough, ~overflow.flatten(), (size == 0).flatten())


def errors_by_slice(got: torch.Tensor, exact: torch.Tensor, along: int = -1) -> torch.Tensor:
    """‖got − exact‖ / ‖exact‖ in fp64 of every slice along a dimension.

    A slice that is exactly zero has the error 0 or infinity. A slice that is not finite has the
    error infinity.
    """
    size = exact.norm(dim=along)
    error = (got.double() - exact).norm(dim=along)
    relative = torch.where(size == 0, torch.where(error == 0, 0.0, torch.inf), error / size)
    return relative.nan_to_num(nan=torch.inf, posinf=torch.inf)


def carrying_the_norm(exact: torch.Tensor, along: int = -1) -> int:
    """Effective number n of slices in the norm: all if they are equal, 1 if one dominates.

    An error measured on them scatters by 1/√n.
    """
    squares = exact.norm(dim=along).square().flatten()
    if not squares.any():
        return 1
    squares = squares / squares.max()
    return max(1, int(squares.sum() ** 2 / squares.square().sum()))


def _quantiles(errors: torch.Tensor) -> list[float]:
    """By rank, the lower one: `torch.quantile` takes at most 16 million values."""
    ranked = errors.sort().values
    return [float(ranked[int(q * (len(ranked) - 1))]) for q in QUANTILES]
