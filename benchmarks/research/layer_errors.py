"""Errors of the experts on captured inputs of a trained model's layers, against fp64.

Only PyTorch and `sonicmoe.experts` are used, so that older checkouts can be measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensors = Mapping[str, torch.Tensor]
GRADIENTS = ("x", "w1", "w2")
# What a norm is taken over: a token of the output and dX, a row of dW1, a column of dW2.
SUMMED = {"output": -1, "dx": -1, "dw1": -1, "dw2": -2}


def exact(layer: Tensors) -> dict[str, torch.Tensor]:
    """The output and gradients in fp64, one expert after the other."""
    x, w1, w2 = (layer[name].double().requires_grad_() for name in GRADIENTS)
    scores, ids = layer["scores"].double(), layer["ids"]
    out = torch.zeros_like(x)
    for e in range(len(w1)):
        token, choice = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w1[e].T).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ w2[e].T
        out = out.index_add(0, token, y * scores[token, choice, None])
    found = torch.autograd.grad(out, (x, w1, w2), layer["dout"].double())
    return dict(zip(SUMMED, (out.detach(), *found), strict=True))


def computed(layer: Tensors, variant: str) -> dict[str, torch.Tensor]:
    """The same by the package, with the precision and memory policy of `variant`."""
    from sonicmoe import experts  # of the checkout that is measured

    precision, _, memory = variant.partition("+memory=")
    x, w1, w2 = (layer[name].clone().requires_grad_() for name in GRADIENTS)
    out = experts(
        x, layer["ids"], layer["scores"], w1, w2, gate_up="concatenated",
        precision=None if precision == "autocast" else precision, memory=memory or "keep",
    )  # fmt: skip
    found = torch.autograd.grad(out, (x, w1, w2), layer["dout"])
    return dict(zip(SUMMED, (out.detach(), *found), strict=True))


def line_errors(got: torch.Tensor, want: torch.Tensor, dim: int) -> torch.Tensor:
    """The error of each token, row or column relative to its norm; those without any are left out,
    for example those of experts that no token chose."""
    norm = want.norm(dim=dim)
    return ((got.double() - want).norm(dim=dim) / norm)[norm > 0]


def summarised(norm: float, lines: torch.Tensor) -> dict[str, float]:
    median, p90 = lines.quantile(lines.new_tensor([0.5, 0.9])).tolist()
    return {"norm": norm, "median": median, "p90": p90}


def errors(layers: Sequence[Tensors], variant: str, device: str) -> dict[str, Any]:
    """Relative errors of every layer, and of all together.

    "norm" is that of the whole tensor (together: of the worst layer), "median" and "p90" are over
    tokens of the output and dX, rows of dW1 and columns of dW2.
    """
    found: list[dict[str, dict[str, float]]] = []
    lines: dict[str, list[torch.Tensor]] = {name: [] for name in SUMMED}
    for captured in layers:
        layer = {name: t.to(device) for name, t in captured.items()}
        want, got = exact(layer), computed(layer, variant)
        found.append({})
        for name, dim in SUMMED.items():
            norm = float((got[name].double() - want[name]).norm() / want[name].norm())
            lines[name].append(line_errors(got[name], want[name], dim).cpu())
            found[-1][name] = summarised(norm, lines[name][-1])
    together = {
        name: summarised(max(layer[name]["norm"] for layer in found), torch.cat(lines[name]))
        for name in SUMMED
    }
    return {"variant": variant, "layers": found, "together": together}
