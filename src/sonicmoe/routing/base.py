"""What every router takes and gives."""

from dataclasses import dataclass

import torch
from torch import nn

from .. import ops
from ..errors import bad_argument
from ..validation import check_floating, check_k, resolve_backend


@dataclass(frozen=True, slots=True)
class Routing:
    """Who goes where, and with which weight.

    logits      (T, E)            what the router decided on
    ids         (T, K) or (S,)    expert of each slot; −1 where a slot is not in use
    scores      as ids, fp32      weight of each slot, differentiable in the logits
    slot_token  (S,) or None      token of each slot, ascending; None: K slots each
    token_start (T+1,) or None    slots of token t are [start[t], start[t+1])
    chosen      (E,) or None      rows of each expert by plain top-K, where the router changed them

    `experts(x, r.ids, r.scores, …, slot_token=r.slot_token, token_start=r.token_start)` goes on.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    slot_token: torch.Tensor | None = None
    token_start: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    def counts(self) -> torch.Tensor:
        """(E,) int32: rows of each expert."""
        backend = resolve_backend(None, self.ids)
        return ops.count(self.ids, self.logits.shape[1], backend)

    def choice_counts(self) -> torch.Tensor:
        """(E,) int32: rows of each expert by the tokens' own choice, which balance losses see."""
        return self.counts() if self.chosen is None else self.chosen


class Router(nn.Module):
    """logits (T, E) → `Routing`. `train()` and `eval()` reach it as they reach any module."""

    def __init__(self, num_experts: int, k: int) -> None:
        super().__init__()
        check_k(k, num_experts)
        self.num_experts = num_experts
        self.k = k

    def forward(self, logits: torch.Tensor, *, backend: str | None = None) -> Routing:
        raise NotImplementedError

    def check(self, logits: torch.Tensor) -> None:
        if logits.dim() != 2 or logits.shape[1] != self.num_experts:
            raise bad_argument(
                "logits", f"(T, E) with E = {self.num_experts}", tuple(logits.shape),
                "Flatten batch and sequence; build the router for this number of experts.",
            )  # fmt: skip
        check_floating("logits", logits)

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, k={self.k}"


def widened(logits: torch.Tensor) -> torch.Tensor:
    """In fp32, or as wide as they come."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
