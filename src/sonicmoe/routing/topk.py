"""The top-K family: the K largest logits of a token, weighted by a softmax."""

import torch

from .base import Router, Routing
from .scores import topk_scores


class TopK(Router):
    """Each token takes its K largest logits, scored by a softmax over these K.

    With `softmax_over_topk=False` the softmax runs over all experts; `renormalize` then makes a
    token's scores sum to one.
    """

    trusted = True

    def __init__(
        self,
        num_experts: int,
        k: int,
        *,
        softmax_over_topk: bool = True,
        renormalize: bool = False,
    ) -> None:
        super().__init__(num_experts, k)
        self.softmax_over_topk = softmax_over_topk
        self.renormalize = renormalize

    def forward(self, logits: torch.Tensor, *, backend: str | None = None) -> Routing:
        self.check(logits)
        scores, ids = topk_scores(
            logits,
            self.k,
            softmax_over_topk=self.softmax_over_topk,
            renormalize=self.renormalize,
            backend=backend,
        )
        return Routing(logits, ids, scores)
