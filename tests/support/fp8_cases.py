"""Problems for the FP8 kernels: e4m3 tensors, rows by expert; what may be wrong with results."""

import torch

from sonicmoe.layer.run import permute
from sonicmoe.tensors import Permutation

# What the layer may err by, of the norm.
LIMITS = {"out": 0.072, "dx": 0.075, "dw1": 0.075, "dw2": 0.075, "dscores": 0.073}
# Of dX and dW1 where the slope of the activation jumps: Z errs by 3.7%, so 1.2% of it changes sign.
KINKS = 0.18
COUNTS = [(0, 1, 127, 128, 129), (300, 0, 57), (1000, 1)]


def random_e4m3(*shape: int, device: str = "cuda") -> torch.Tensor:
    """Normal numbers of deviation 32, so that rounding and range of e4m3 both matter."""
    return (32 * torch.randn(shape, device=device)).clamp(-448, 448).to(torch.float8_e4m3fn)


def routed(counts: tuple[int, ...], sorted_rows: bool, device: str) -> Permutation:
    """One expert per token, in random order; `counts` rows for each expert."""
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    order = torch.randperm(len(experts))
    p = permute(experts[order][:, None].int().to(device), len(counts))
    return Permutation.of_sorted_rows(p.expert_start, p.tiles, p.tile_m) if sorted_rows else p


def dequantized(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(R, C) e4m3 with a scale (J, R) for each block of 128 columns."""
    per_column = scale.T.repeat_interleave(128, 1)[:, : q.shape[1]]
    return q.double() * per_column.double()


def row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest of the rows' errors, each relative to the row's norm."""
    got, want = got.double(), want.double()
    return float(((got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)).max())
