"""Dense cuBLAS GEMMs with the FLOPs of a layer: the baseline of every benchmark."""

from collections.abc import Callable

import torch

from sonicmoe.shapes import Problem

DENSE = "dense"


def dense_gemms(
    p: Problem, device: str | torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Six batched GEMMs, T·K/E rows for every expert, named as in `gemms.NAMES`."""
    rows = max(1, p.R // p.E)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(p.E, *shape, device=device, dtype=dtype)

    x, w1, a, w2 = random(rows, p.H), random(p.H, p.N), random(rows, p.I), random(p.I, p.H)
    dz, dy = random(rows, p.N), random(rows, p.H)
    return {
        "up": lambda: torch.bmm(x, w1),
        "down": lambda: torch.bmm(a, w2),
        "dz": lambda: torch.bmm(dy, w2.mT),
        "dw2": lambda: torch.bmm(a.mT, dy),
        "dx": lambda: torch.bmm(dz, w1.mT),
        "dw1": lambda: torch.bmm(x.mT, dz),
    }


def dense(
    p: Problem, device: str | torch.device, dtype: torch.dtype
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Run the GEMMs of the forward pass, and of the forward and backward pass.

    Not a layer: there is no router, gather, activation or combine.
    """
    gemms = dense_gemms(p, device, dtype)

    def run(*names: str) -> None:
        for name in names:
            gemms[name]()

    return lambda: run("up", "down"), lambda: run(*gemms)
