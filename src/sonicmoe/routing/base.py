"""The base class of routers and what they return."""

from dataclasses import dataclass

import torch
from torch import nn

from .. import ops
from ..errors import bad_argument
from ..validation import check_floating, check_k, resolve_backend


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that a router chose for each token, and their scores.

    logits      (T, E)            input of the router
    ids         (T, K) or (S,)    expert of each slot; −1 where a slot is not in use
    scores      as ids, fp32      score of each slot, differentiable in the logits
    slot_token  (S,) or None      token of each slot, ascending; None: K slots each
    token_start (T+1,) or None    slots of token t are [start[t], start[t+1])
    chosen      (E,) or None      rows of each expert by plain top-K, if the router changed them

    Pass it on with
    `experts(x, r.ids, r.scores, …, slot_token=r.slot_token, token_start=r.token_start)`.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    slot_token: torch.Tensor | None = None
    token_start: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    def counts(self) -> torch.Tensor:
        """Return the rows of each expert, (E,) int32."""
        backend = resolve_backend(None, self.ids)
        return ops.count(self.ids, self.logits.shape[1], backend)

    def choice_counts(self) -> torch.Tensor:
        """Return the rows of each expert by plain top-K, (E,) int32; balance losses use these."""
        return self.counts() if self.chosen is None else self.chosen


class Router(nn.Module):
    """Base class of routers: a module whose `forward` maps logits (T, E) to a `Routing`."""

    def __init__(self, num_experts: int, k: int) -> None:
        super().__init__()
        check_k(k, num_experts)
        self.num_experts = num_experts
        self.k = k

    def forward(self, logits: torch.Tensor, *, backend: str | None = None) -> Routing:
        raise NotImplementedError

    def _join(self, layer: nn.Module, *, copied: bool = False) -> None:
        """Called when this router is assigned to `layer`, or (`copied`) copied together with it."""

    def check(self, logits: torch.Tensor) -> None:
        if logits.dim() != 2 or logits.shape[1] != self.num_experts:
            raise bad_argument(
                "logits",
                f"(T, E) with E = {self.num_experts}",
                tuple(logits.shape),
                "Flatten batch and sequence; build the router for this number of experts.",
            )
        check_floating("logits", logits)

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, k={self.k}"


def at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    """The logits in fp32; float64 stays float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
