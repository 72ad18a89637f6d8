"""Top-K with scores, the auxiliary loss, and the permutation that sorts rows by expert."""

import itertools

import torch

from ..errors import bad_argument
from ..shapes import ceil_div, max_tiles


def router_gradient_into(dx: torch.Tensor, dlogits: torch.Tensor, weight: torch.Tensor) -> None:
    dx.addmm_(dlogits, weight)


def topk(
    logits: torch.Tensor, k: int, softmax_over_topk: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (T, E) → scores (T, K) in fp32 or better, ids (T, K) int32. Ties: the lower id."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    order = wide.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    if softmax_over_topk:
        scores = wide.gather(1, order).softmax(-1)
    else:
        scores = wide.softmax(-1).gather(1, order)
    return scores, order.to(torch.int32)


def topk_backward(
    dscores: torch.Tensor,
    scores: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    softmax_over_topk: bool,
) -> torch.Tensor:
    """dlogits (T, E), zero outside the choice where the softmax ran over the choice alone."""
    picked = ids.long()
    inner = (dscores * scores).sum(-1, keepdim=True)
    if softmax_over_topk:
        dense = torch.zeros(logits.shape, dtype=scores.dtype, device=logits.device)
        return dense.scatter_(1, picked, scores * (dscores - inner)).to(logits.dtype)
    dlogits = -logits.to(scores.dtype).softmax(-1) * inner
    return dlogits.scatter_add_(1, picked, scores * dscores).to(logits.dtype)


def sigmoid_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    groups: int,
    kept: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, sigmoids and ids, each (T, K), of the K largest of sigmoid(logits) + bias."""
    every = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
    ranking = every + bias
    if groups != kept:
        grouped = ranking.unflatten(1, (groups, -1))
        best_two = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1)
        alive = torch.zeros_like(best_two, dtype=torch.bool)
        alive.scatter_(1, topk(best_two, kept, True)[1].long(), True)
        ranking = grouped.masked_fill(~alive.unsqueeze(-1), float("-inf")).flatten(1)
    ids = topk(ranking, k, True)[1]
    affinity = every.gather(1, ids.long())
    scores = affinity * scale
    if normalize:
        scores = scores / (affinity.sum(-1, keepdim=True) + 1e-20)
    return scores, affinity, ids


def sigmoid_topk_backward(
    dscores: torch.Tensor,
    affinity: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    normalize: bool,
    scale: float,
) -> torch.Tensor:
    """dlogits (T, E), zero outside the choice."""
    if normalize:
        total = affinity.sum(-1, keepdim=True) + 1e-20
        dscores = (dscores - (dscores * affinity).sum(-1, keepdim=True) / total) / total
    slope = scale * dscores * affinity * (1 - affinity)
    dense = torch.zeros(logits.shape, dtype=affinity.dtype, device=logits.device)
    return dense.scatter_(1, ids.long(), slope).to(logits.dtype)


def count(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """(E,) int32, without waiting for the device."""
    flat = ids.flatten().long()
    bin_ = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, bin_, torch.ones_like(bin_, dtype=torch.int32))[:num_experts]


_LEAST = 1e-12  # of a sum that is divided by


def balance(
    logits: torch.Tensor, counts: torch.Tensor | None, balance: float, z: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of `kernels.balance`, and dL/ds (E,)."""
    tokens, experts = logits.shape
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sums = wide.softmax(-1).sum(0)
    norm = sums.sum().clamp_min(_LEAST)
    rows = torch.zeros_like(sums) if counts is None else counts.to(wide.dtype)
    rows = rows / rows.sum().clamp_min(_LEAST)
    inner = (sums / norm * rows).sum()
    mean = wide.logsumexp(-1).square().sum() / max(tokens, 1)
    return balance * experts * inner + z * mean, balance * experts * (rows - inner) / norm


def balance_backward(
    dloss: torch.Tensor, slope: torch.Tensor, logits: torch.Tensor, z: float
) -> torch.Tensor:
    """dlogits (T, E)."""
    wide = logits.to(slope.dtype)
    share = wide.softmax(-1)
    inner = (share * slope).sum(-1, keepdim=True)
    lse = wide.logsumexp(-1, keepdim=True)
    dlogits = share * (slope - inner + 2 * z / max(len(logits), 1) * lse)
    return (dloss * dlogits).to(logits.dtype)


def permute(
    ids: torch.Tensor, num_experts: int, slot_token: torch.Tensor | None, tile_m: int
) -> tuple[torch.Tensor, ...]:
    """ids (T, K), or (S,) with `slot_token`, the token of each slot → the maps of `Permutation`."""
    flat = ids.flatten().long()
    here = (flat >= 0) & (flat < num_experts)
    order = torch.where(here, flat, num_experts).argsort(stable=True)
    counts = torch.bincount(flat[here], minlength=num_experts)
    start = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    used = torch.arange(flat.numel(), device=flat.device) < start[-1]

    token = order // ids.shape[-1] if slot_token is None else slot_token[order]
    slot_row = torch.empty_like(order)
    slot_row[order] = torch.where(used, torch.arange(flat.numel(), device=flat.device), -1)

    table = tile_table(start, flat.numel(), tile_m)
    maps = (token, order, slot_row, counts, start, table)
    return tuple(m.to(torch.int32) for m in maps)


def tiles(offsets: torch.Tensor, rows: int, tile_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """expert_start and the tile table; a ValueError where offsets are out of bounds."""
    bounds = [0, *offsets.tolist(), rows]
    if any(start > end for start, end in itertools.pairwise(bounds)):
        raise bad_argument(
            "counts or offsets",
            f"rows of each expert, {rows} in all at most",
            f"offsets {bounds[1:-1]}",
            "Count the rows that are passed.",
        )
    table = tile_table(offsets, rows, tile_m)
    return offsets.to(torch.int32, copy=True), table.to(torch.int32)


def tile_table(expert_start: torch.Tensor, rows: int, tile_m: int) -> torch.Tensor:
    """(1+n, 4): the number of tiles and the rows of the longest expert, then of each tile its
    expert, the expert's first and end row, and its number among the expert's tiles."""
    start = expert_start.tolist()
    table = [
        (e, start[e], start[e + 1], number)
        for e in range(len(start) - 1)
        for number in range(ceil_div(start[e + 1] - start[e], tile_m))
    ]
    bound = max_tiles(rows, len(start) - 1, tile_m)
    assert len(table) <= bound, f"{ceil_div(rows, tile_m)=} {len(table)=}"
    out = torch.full((1 + bound, 4), -1, device=expert_start.device)
    longest = max(end - begin for begin, end in itertools.pairwise(start))
    out[0] = torch.tensor([len(table), longest, 0, 0])
    out[1 : 1 + len(table)] = torch.tensor(table, dtype=out.dtype).reshape(-1, 4)
    return out
