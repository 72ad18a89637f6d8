"""Input tensors of one case: their values, and a uniform or skewed routing.

Skew comes from the router itself, so that nothing is added to the layer that is timed: column 0 of
x is the constant 1, which makes column 0 of the router's weight an offset per expert. The offsets
are fitted until the experts get the requested shares. A token chooses an expert at most once, so
with a router no expert gets more than 1/K of the rows.

Without the router, uniform ids are those of the router; skewed ids are drawn slot by slot, so that
the shares hold even above 1/K (a token may then have the same expert twice).

Values are Gaussian of order one. Others (`values.py`) are made from these after the routing, so
that they do not change it: they are for layers without the router.
"""

from dataclasses import dataclass

import torch

from ..errors import bad_argument
from ..reference.routing import topk
from .cases import Case
from .values import Tensors, shaped

ROUTINGS = ("uniform", "zipf", "hot")
HOT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors that every candidate of a comparison receives."""

    case: Case
    routing: str
    x: torch.Tensor  # (T, H)
    router_w: torch.Tensor  # (E, H)
    w1: torch.Tensor  # (E, N, H)
    w2: torch.Tensor  # (E, H, I)
    b1: torch.Tensor | None  # (E, N)
    b2: torch.Tensor | None  # (E, H)
    dout: torch.Tensor  # (T, H)
    router_ids: torch.Tensor  # (T, K): what the router chooses
    ids: torch.Tensor  # (T, K): the choice without the router
    scores: torch.Tensor  # (T, K) fp32, without the router
    values: str = "gaussian"

    def counts(self, router: bool) -> list[int]:
        """Rows of each expert."""
        ids = self.router_ids if router else self.ids
        return ids.flatten().bincount(minlength=self.case.problem.E).tolist()


def make_inputs(
    case: Case,
    routing: str = "uniform",
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    values: str = "gaussian",
) -> Inputs:
    p = case.problem
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        t = torch.empty(shape, device=device, dtype=dtype)
        return t.normal_(0, std, generator=generator)

    x = normal(p.T, p.H)
    router_w = normal(p.E, p.H, std=p.H**-0.5)
    target = shares(routing, p.E)
    if routing != "uniform":
        x[:, 0] = 1
        router_w[:, 0] = 0
        router_w[:, 0] = _offsets(x, router_w, p.K, _capped(target, 1 / p.K)).to(dtype)

    softmax_over_topk = case.router != "topk_over_softmax"
    logits = torch.nn.functional.linear(x, router_w)
    router_scores, router_ids = topk(logits, p.K, softmax_over_topk)
    if routing == "uniform":
        ids, scores = router_ids, router_scores
    else:
        weights = torch.tensor(target, device=device)
        drawn = torch.multinomial(weights, p.R, replacement=True, generator=generator)
        ids = drawn.view(p.T, p.K).to(torch.int32)
        scores = normal(p.T, p.K).float().softmax(-1)

    w1, w2 = normal(p.E, p.N, p.H, std=p.H**-0.5), normal(p.E, p.H, p.I, std=p.I**-0.5)
    b1, b2 = (normal(p.E, n) if case.bias else None for n in (p.N, p.H))
    dout = normal(p.T, p.H)
    if values != "gaussian":
        tensors = Tensors(*(t.float() for t in (x, w1, w2, dout, scores)))
        *rounded, scores = shaped(values, tensors, generator)
        x, w1, w2, dout = (t.to(dtype) for t in rounded)

    return Inputs(
        case=case,
        routing=routing,
        x=x.requires_grad_(),
        router_w=router_w.requires_grad_(),
        w1=w1.requires_grad_(),
        w2=w2.requires_grad_(),
        b1=None if b1 is None else b1.requires_grad_(),
        b2=None if b2 is None else b2.requires_grad_(),
        dout=dout,
        router_ids=router_ids,
        ids=ids,
        scores=scores.requires_grad_(),
        values=values,
    )


def shares(routing: str, experts: int) -> list[float]:
    """Each expert's share of the rows: even, ∝ 1/rank, or a quarter for the first one."""
    if routing == "uniform" or experts == 1:
        weights = [1.0] * experts
    elif routing == "zipf":
        weights = [1 / (rank + 1) for rank in range(experts)]
    elif routing == "hot":
        weights = [HOT_SHARE] + [(1 - HOT_SHARE) / (experts - 1)] * (experts - 1)
    else:
        raise bad_argument("routing", f"one of {', '.join(ROUTINGS)}", repr(routing), "Choose one.")
    total = sum(weights)
    return [weight / total for weight in weights]


def _capped(shares: list[float], cap: float) -> list[float]:
    """The same shares with none above `cap`; what is cut off goes to the others in proportion."""
    full = [False] * len(shares)
    while True:
        free = sum(share for share, at_cap in zip(shares, full, strict=True) if not at_cap)
        scale = (1 - cap * sum(full)) / free if free else 0.0
        scaled = [cap if f else s * scale for s, f in zip(shares, full, strict=True)]
        over = [f or s > cap for s, f in zip(scaled, full, strict=True)]
        if over == full:
            return scaled
        full = over


def _offsets(
    x: torch.Tensor, router_w: torch.Tensor, k: int, target: list[float], steps: int = 40
) -> torch.Tensor:
    logits = torch.nn.functional.linear(x[:8192], router_w).float()
    wanted = torch.tensor(target, device=x.device)
    offsets = wanted.log()
    for _ in range(steps):
        chosen = (logits + offsets).topk(k, dim=-1).indices.flatten()
        actual = chosen.bincount(minlength=len(target)) / chosen.numel()
        offsets += 0.5 * (wanted / actual.clamp_min(0.1 * wanted)).log()
        offsets -= offsets.mean()
    return offsets
