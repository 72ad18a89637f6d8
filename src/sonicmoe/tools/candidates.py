"""A candidate of a benchmark: a forward function and the tensors that get gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .inputs import Inputs

OURS = "sonicmoe"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation of the layer on given inputs.

    `leaves` are the tensors that get gradients: x, w1, w2, b1 and b2 with biases, and router_w or,
    without the router, scores.
    """

    name: str
    router: bool
    forward: Callable[[], torch.Tensor]
    leaves: dict[str, torch.Tensor] = field(repr=False)
    dout: torch.Tensor = field(repr=False)
    gate_up: str = "interleaved"

    def gradients(
        self, out: torch.Tensor, dout: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        upstream = self.dout if dout is None else dout
        found = torch.autograd.grad(out, tuple(self.leaves.values()), upstream)
        return dict(zip(self.leaves, found, strict=True))

    def forward_backward(self) -> None:
        self.gradients(self.forward())


def leaves_of(inputs: Inputs, router: bool) -> dict[str, torch.Tensor]:
    choice = {"router_w": inputs.router_w} if router else {"scores": inputs.scores}
    named = {"x": inputs.x, "w1": inputs.w1, "w2": inputs.w2, "b1": inputs.b1, "b2": inputs.b2}
    return {name: t for name, t in (named | choice).items() if t is not None}


def ours(
    inputs: Inputs, *, router: bool, gate_up: str = "interleaved", layers: int = 1
) -> Candidate:
    """The layer of this package, through its public functions; `layers` of them share weights."""
    from ..functional import experts
    from ..routing import Sigmoid
    from ..routing.scores import router_logits, topk_scores

    case, i = inputs.case, inputs

    def layer(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        weights = (i.w1, i.w2, i.b1, i.b2)
        return experts(x, ids, scores, *weights, activation=case.activation, gate_up=gate_up)

    sigmoid = None
    if case.router == "sigmoid":
        sigmoid = Sigmoid(case.problem.E, case.problem.K).to(i.x.device)

    def with_router(x: torch.Tensor) -> torch.Tensor:
        logits, x = router_logits(x, i.router_w)
        if sigmoid is not None:
            r = sigmoid(logits)
            return layer(x, r.ids, r.scores)
        over_topk = case.router == "softmax_over_topk"
        norm = case.router == "topk_over_softmax_normalized"
        k = case.problem.K
        scores, ids = topk_scores(logits, k, softmax_over_topk=over_topk, renormalize=norm)
        return layer(x, ids, scores)

    def forward() -> torch.Tensor:
        x = i.x
        for _ in range(layers):
            x = with_router(x) if router else layer(x, i.ids, i.scores)
        return x

    return Candidate(OURS, router, forward, leaves_of(inputs, router), inputs.dout, gate_up)
