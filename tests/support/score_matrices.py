"""Score matrices (T, E) to round: easy ones, and those that go wrong where ties or sizes matter."""

import torch

from sonicmoe.reference.token_rounding import softmax_scores


def _random(tokens, experts, seed):
    return torch.randn(tokens, experts, generator=seed).softmax(-1)


def _skewed(tokens, experts, seed):
    favour = 4.0 / torch.arange(1, experts + 1)
    return (torch.randn(tokens, experts, generator=seed) + favour).softmax(-1)


def _tied(tokens, experts, seed):
    """Multiples of one eighth, zeros among them."""
    return torch.randint(0, 5, (tokens, experts), generator=seed) / 8


def _equal(tokens, experts, seed):
    return torch.full((tokens, experts), 1 / experts)


def _one_expert(tokens, experts, seed):
    scores = 0.1 * torch.rand(tokens, experts, generator=seed)
    scores[:, experts // 2] += 0.9
    return scores


def _close(tokens, experts, seed):
    """Neighbours in fp32, which score − 1 could not tell apart."""
    step = torch.randint(0, 4, (tokens, experts), generator=seed)
    return 0.001 + step * 2.0**-33


SCORES = {
    "random": _random,
    "skewed": _skewed,
    "tied": _tied,
    "equal": _equal,
    "one_expert": _one_expert,
    "close": _close,
}


def assert_softmax(scores: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor | None) -> None:
    """To a few steps of fp32, and one more for each unit below the row's peak: exp(l − peak) errs
    by as much as its argument does.
    """
    true = softmax_scores(logits.double(), ids)
    below = logits.double().amax(1, keepdim=True) - logits.double()
    error = (scores.double() - true).abs()
    assert (error <= true * (6 + below) * 2.0**-23 + 1e-37).all(), (error / true).max()


def top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """ids (T, K) of the largest scores; ties go to the lower expert."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    return order[:, :k].to(torch.int32)


def kept_pairs(expert: torch.Tensor, token: torch.Tensor, tokens: int, experts: int):
    """(T, E) bool from a list of pairs; no pair twice."""
    used = expert >= 0
    kept = torch.zeros(tokens, experts, dtype=torch.int32)
    place = (token[used].long(), expert[used].long())
    kept.index_put_(place, torch.ones((), dtype=torch.int32), accumulate=True)
    assert (kept <= 1).all()
    return kept.bool()
