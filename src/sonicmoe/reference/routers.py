"""Routers written the long way, an expert or a token at a time: the oracles of the tests."""

from collections.abc import Iterable, Sequence

import torch


def _best_first(candidates: Iterable[int], scores: Sequence[float]) -> list[int]:
    """Larger scores first; ties go to the lower number."""
    return sorted(candidates, key=lambda i: (-scores[i], i))


def rounded_rows(
    scores: torch.Tensor,
    ids: torch.Tensor,
    tile: int,
    subroutine: str,
    uniform: Sequence[float] = (),
) -> tuple[list[int], torch.Tensor]:
    """Rows of each expert under token rounding, and (T, E) bool: the pairs that are kept.

    An expert rounds up only where there are enough tokens; Balance-f passes over one without.
    """
    tokens, experts = scores.shape
    rows, kept, error = [], torch.zeros(tokens, experts, dtype=torch.bool), 0
    for e in range(experts):
        column = scores[:, e].tolist()
        chose = [t for t in range(tokens) if e in ids[t].tolist()]
        others = [t for t in range(tokens) if t not in chose]
        ranked = _best_first(chose, column) + _best_first(others, column)
        f = len(chose)
        down = f // tile * tile
        up = -(-f // tile) * tile
        if up == down or up > tokens:
            goes_up = False
        elif subroutine == "nr-f":
            goes_up = up - f < f - down
        elif subroutine == "sr-f":
            goes_up = uniform[e] < (f - down) / tile
        elif subroutine == "nr-s":
            sums = [sum(column[t] for t in ranked[:n]) for n in (down, f, up)]
            share = (sums[1] - sums[0]) / (sums[2] - sums[0]) if sums[2] > sums[0] else 0.0
            goes_up = uniform[e] < share
        elif subroutine == "balance-f":
            goes_up = abs(up - f + error) < abs(down - f + error)
            error += (up if goes_up else down) - f
        else:
            goes_up = subroutine == "up"
        rows.append(up if goes_up else down)
        kept[ranked[: rows[-1]], e] = True
    return rows, kept


def sigmoid(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    groups: int,
    groups_kept: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's router, token by token: scores (T, K), differentiable, and ids (T, K)."""
    tokens, experts = logits.shape
    size = experts // groups
    all_scores, all_ids = [], []
    for t in range(tokens):
        affinity = logits[t].sigmoid()
        ranking = (affinity + bias).tolist()
        best_two = [
            sum(sorted(ranking[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(groups)
        ]
        alive = _best_first(range(groups), best_two)[:groups_kept]
        candidates = [e for e in range(experts) if e // size in alive]
        picked = _best_first(candidates, ranking)[:k]
        scores = affinity[picked]
        if normalize:
            scores = scores / scores.sum()
        all_scores.append(scores * scale)
        all_ids.append(torch.tensor(picked))
    return torch.stack(all_scores), torch.stack(all_ids)


def expert_choice(logits: torch.Tensor, k: int) -> torch.Tensor:
    """(T, E) bool: each expert takes the ceil(T·K/E) tokens with its largest softmax scores."""
    tokens, experts = logits.shape
    probability, capacity = logits.softmax(-1), -(-tokens * k // experts)
    taken = torch.zeros(tokens, experts, dtype=torch.bool)
    for e in range(experts):
        ranked = _best_first(range(tokens), probability[:, e].tolist())
        taken[ranked[:capacity], e] = True
    return taken
