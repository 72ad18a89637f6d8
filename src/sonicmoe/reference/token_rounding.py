"""Token rounding without host synchronisation: ranks by sorting, pairs by a cumulative sum."""

import torch

SUBROUTINES = ("nr-f", "sr-f", "nr-s", "balance-f", "up", "down")
STOCHASTIC = ("sr-f", "nr-s")


def most_rows(tokens: int, experts: int, k: int, tile: int, subroutine: str) -> int:
    """Upper bound on the pairs that are kept, whatever the scores.

    T·K and what rounding up can add: less than half a tile an expert where the nearest multiple
    is taken, half a tile in all where errors are balanced, less than a tile an expert otherwise.
    """
    added = {
        "nr-f": experts * ((tile - 1) // 2),
        "balance-f": (tile - 1) // 2,
        "down": 0,
    }
    return tokens * k + added.get(subroutine, experts * (tile - 1))


def softmax_scores(logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """(T, E) in fp32 or better, divided by their sum over the choice ids (T, K) if it is given."""
    scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return scores if ids is None else scores / scores.gather(1, ids.long()).sum(-1, keepdim=True)


def round_tokens(
    scores: torch.Tensor,
    ids: torch.Tensor,
    tile: int,
    subroutine: str,
    uniform: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """What `ops.round_tokens` returns, in its order."""
    tokens, experts = scores.shape
    here = torch.where((ids >= 0) & (ids < experts), ids, experts).long()
    chosen = scores.new_zeros(tokens, experts + 1, dtype=torch.bool).scatter_(1, here, True)
    chosen = chosen[:, :experts]
    count = chosen.sum(0)
    order = _by_preference(scores, chosen)
    down = count - count % tile
    up = _goes_up(scores.gather(0, order), count, tile, subroutine, uniform)
    rows = torch.where(up, down + tile, torch.where(count > down, down, count))

    place = torch.arange(tokens, device=scores.device).unsqueeze(1).expand(tokens, experts)
    rank = torch.empty_like(order).scatter_(0, order, place)
    kept = rank < rows
    pairs = _pairs(scores, kept, most_rows(tokens, experts, ids.shape[1], tile, subroutine))
    return *pairs, rows.to(torch.int32), count.to(torch.int32)


def round_logits(logits, ids, normalize, tile, subroutine, uniform) -> tuple[torch.Tensor, ...]:
    scores = softmax_scores(logits, ids if normalize else None)
    return round_tokens(scores, ids, tile, subroutine, uniform)


def round_logits_backward(
    dscore: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    pair_expert: torch.Tensor,
    token_start: torch.Tensor,
) -> torch.Tensor:
    """dlogits (T, E).

    A score is s_e = w_e / Σ w, w = exp(logit), the sum over all experts or over the choice. So
    ds_e/dl_j = s_e·([e = j] − s_j) where j is in that sum and s_e·[e = j] elsewhere, and
    dl_j = s_j·(d_j − [j in the sum]·Σ_e s_e·d_e).
    """
    scores = softmax_scores(logits, ids)
    slot = torch.arange(len(pair_expert), device=logits.device, dtype=torch.int32)
    pair_token = torch.searchsorted(token_start[1:], slot, right=True)
    slope = spread_pairs(dscore, pair_expert, pair_token, scores.shape)
    among = torch.ones_like(scores)
    if ids is not None:
        among = torch.zeros_like(scores).scatter_(1, ids.long(), 1.0)
    inner = (scores * slope).sum(-1, keepdim=True)
    return (scores * (slope - among * inner)).to(logits.dtype)


def spread_pairs(
    value: torch.Tensor, pair_expert: torch.Tensor, pair_token: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """(T, E) with the value of each kept pair at its place, and zeros."""
    tokens, experts = shape
    # Pairs are unique, so each place is written once; the unused ones share one too many.
    place = torch.where(
        pair_expert < 0, tokens * experts, pair_token.long() * experts + pair_expert
    )
    flat = value.new_zeros(tokens * experts + 1).scatter_(0, place, value)
    return flat[:-1].view(tokens, experts)


def _by_preference(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(T, E): each expert's tokens, the chosen ones first, larger scores first, then lower tokens.

    Chosen before others and then by score is the order of the preference (score, or score − 1)
    without the ties that the subtraction would round into it.
    """
    order = scores.argsort(dim=0, descending=True, stable=True)
    first = chosen.gather(0, order).to(torch.int8).argsort(dim=0, descending=True, stable=True)
    return order.gather(0, first)


def _goes_up(ranked, count, tile, subroutine, uniform) -> torch.Tensor:
    """(E,) bool. A multiple of the tile stays, and nobody goes up without tokens enough."""
    tokens = ranked.shape[0]
    rest = count % tile
    possible = (rest > 0) & (count - rest + tile <= tokens)
    if subroutine == "nr-f":
        up = 2 * rest > tile
    elif subroutine == "sr-f":
        up = uniform * tile < rest
    elif subroutine == "nr-s":
        place = torch.arange(tokens, device=ranked.device).unsqueeze(1)
        start = count - rest
        dropped = torch.where((place >= start) & (place < count), ranked, 0).sum(0)
        added = torch.where((place >= count) & (place < start + tile), ranked, 0).sum(0)
        up = uniform * (dropped + added) < dropped
    elif subroutine == "balance-f":
        # Going down adds −rest to the error and going up tile − rest: the same modulo the tile. So
        # the error after each expert is the smallest number in the class of −Σ rest.
        step = torch.where(possible, rest, 0)
        total = step.cumsum(0)
        half = tile // 2
        error = (half - total) % tile
        before = (half - (total - step)) % tile
        up = error > before
    else:
        up = torch.full_like(possible, subroutine == "up")
    return up & possible


def _pairs(scores, kept, slots) -> tuple[torch.Tensor, ...]:
    """The kept pairs ordered by token, then by expert, in `slots` places; −1 and T where unused."""
    tokens, experts = scores.shape

    def spread(values, fill):
        values = values.expand(tokens, experts).flatten()
        # What is not kept lands in one place too many, which is cut off.
        return values.new_full((slots + 1,), fill).scatter_(0, slot, values)[:slots]

    slot = torch.where(kept.flatten(), kept.flatten().cumsum(0) - 1, slots)
    number = torch.arange(max(tokens, experts), device=scores.device, dtype=torch.int32)
    start = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return (
        spread(number[:experts].unsqueeze(0), -1),
        spread(number[:tokens].unsqueeze(1), tokens),
        spread(scores, 0.0),
        start,
    )
