"""Expert choice: every expert takes the same number of tokens."""

import torch

from ..shapes import ceil_div
from .base import Router, Routing, at_least_fp32
from .scores import topk_scores


class ExpertChoice(Router):
    """Each expert takes the ceil(T·K/E) tokens with the largest softmax scores.

    Ties go to the lower token. A token's experts depend on the other tokens of the batch, later
    ones included, so in `eval()` this router is top-K over a softmax instead.
    """

    trusted = True

    def forward(self, logits: torch.Tensor, *, backend: str | None = None) -> Routing:
        self.check(logits)
        if not self.training:
            scores, ids = topk_scores(logits, self.k, softmax_over_topk=False, backend=backend)
            return Routing(logits, ids, scores)
        capacity = ceil_div(logits.shape[0] * self.k, self.num_experts)
        best, token = at_least_fp32(logits).softmax(-1).sort(dim=0, descending=True, stable=True)
        slot_token, order = token[:capacity].flatten().sort(stable=True)
        number = torch.arange(self.num_experts, device=logits.device, dtype=torch.int32)
        ids = number.expand(capacity, -1).flatten().gather(0, order)
        scores = best[:capacity].flatten().gather(0, order)
        every = torch.arange(len(logits) + 1, device=logits.device)
        token_start = torch.searchsorted(slot_token, every, out_int32=True)
        return Routing(logits, ids, scores, slot_token.to(torch.int32), token_start)
