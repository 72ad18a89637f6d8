"""The whole layer on one screen, in plain differentiable PyTorch: the oracle of the tests."""

import torch

from ..enums import ActivationType
from .activation import activate


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    activation: ActivationType = ActivationType.SWIGLU,
    gate_up: str = "interleaved",
) -> torch.Tensor:
    """O_t = Σ_k s_tk · (W2 act(W1 x_t + b1) + b2) of expert ids_tk; ids outside [0, E): nothing."""
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        token, k = (ids == e).nonzero(as_tuple=True)
        z = torch.nn.functional.linear(x[token], w1[e], None if b1 is None else b1[e])
        a = activate(z, activation, gate_up)
        y = torch.nn.functional.linear(a, w2[e], None if b2 is None else b2[e])
        out = out.index_add(0, token, (scores[token, k].unsqueeze(-1) * y).to(out.dtype))
    return out


def route(
    logits: torch.Tensor, k: int, softmax_over_topk: bool, renormalize: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (T, K), differentiable in the logits, and ids (T, K), written the long way."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    if softmax_over_topk:
        return logits.gather(1, order).softmax(-1), order
    scores = logits.softmax(-1).gather(1, order)
    return scores / scores.sum(-1, keepdim=True) if renormalize else scores, order
