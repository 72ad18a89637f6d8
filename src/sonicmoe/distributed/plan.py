"""What the ranks of a group send: a token goes to a rank once, with its pairs there."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..layer.run import permute
from .agreement import Settings, exchange_counts


@dataclass(frozen=True, slots=True)
class Traffic:
    """How many entries go to each rank of the group, and how many come from each."""

    sends: list[int]
    receives: list[int]
    group: dist.ProcessGroup | None

    def forth(self, lines: torch.Tensor) -> torch.Tensor:
        return self._exchange(lines, self.sends, self.receives)

    def back(self, lines: torch.Tensor) -> torch.Tensor:
        return self._exchange(lines, self.receives, self.sends)

    def _exchange(self, lines: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
        arrived = lines.new_empty(sum(into), *lines.shape[1:])
        dist.all_to_all_single(arrived, lines.contiguous(), into, out, group=self.group)
        return arrived


@dataclass(frozen=True, slots=True)
class Plan:
    """The maps of the sending side. A *row* is a token on its way to a rank, a *pair* one of its
    experts there; both are sorted by rank, then by token.

    row_token    (rows,)   row  -> token
    slot_row     (S,)      slot -> row, on a token's first slot that goes to that rank; else -1
    token_start  (T+1,)    slots of token t are [start[t], start[t+1]); None: K slots each
    pair_slot    (pairs,)  pair -> slot
    pair_row     (pairs,)  pair -> row, counted from the first row of its rank
    slot_pair    (S,)      slot -> pair, the inverse; -1 where the slot's expert does not exist
    coming       (ranks,2) how many rows and pairs each rank sends here

    Two ranks of two experts, ids = [[0, 3], [2, 3]]: row_token = [0, 0, 1] and
    pair_row = [0, 0, 1, 1]: the second token goes to rank 1 once, for both of its experts.
    """

    tokens: int
    rows: Traffic
    pairs: Traffic
    row_token: torch.Tensor
    slot_row: torch.Tensor
    token_start: torch.Tensor | None
    pair_slot: torch.Tensor
    pair_row: torch.Tensor
    slot_pair: torch.Tensor
    coming: torch.Tensor


def make_plan(
    ids: torch.Tensor,
    tokens: int,
    settings: Settings,
    group: dist.ProcessGroup | None,
    slot_token: torch.Tensor | None = None,
    token_start: torch.Tensor | None = None,
) -> Plan:
    """ids (T, K), or (S,) with `slot_token`; expert e lives on rank e // experts_per_rank.

    Raises a ValueError on every rank if their settings differ. Waits for the device once:
    `all_to_all_single` needs its split sizes on the host.
    """
    ranks, slots, device = dist.get_world_size(group), ids.numel(), ids.device
    experts_per_rank = settings.experts_per_rank
    here = (ids >= 0) & (ids < ranks * experts_per_rank)
    rank = torch.where(here, ids // experts_per_rank, -1)
    # The layer's own sort, with ranks instead of experts, makes the list of pairs.
    p = permute(rank, ranks, slot_token=slot_token, tokens=tokens, token_start=token_start)
    assert p.row_token is not None and p.row_slot is not None and p.slot_row is not None
    pair_start, pair_token, slot_pair = p.expert_start.long(), p.row_token, p.slot_row.long()

    # Pairs of one token on one rank are adjacent: the first of them carries the row.
    starts = torch.zeros(slots + 1, dtype=torch.bool, device=device)
    starts[1:-1] = pair_token[1:] != pair_token[:-1]
    starts.index_fill_(0, pair_start, True)
    first = starts[:-1] & (torch.arange(slots, device=device) < pair_start[-1])
    before = torch.nn.functional.pad(first.cumsum(0), (1, 0))  # rows that start before a pair
    row, row_start = before[1:] - 1, before[pair_start]

    leaving = torch.stack([row_start.diff(), pair_start.diff()], dim=1)
    coming, (rows_out, pairs_out, rows_in, pairs_in) = exchange_counts(leaving, settings, group)

    num_rows, num_pairs = sum(rows_out), sum(pairs_out)
    row_token = torch.empty(slots + 1, dtype=torch.long, device=device)
    row_token.scatter_(0, torch.where(first, row, slots), pair_token.long())  # the last: discarded
    slot_row = _at(torch.where(first, row, -1), slot_pair)
    rank_start = row_start[:-1].repeat_interleave(pair_start.diff(), output_size=num_pairs)
    return Plan(
        tokens=tokens,
        rows=Traffic(rows_out, rows_in, group),
        pairs=Traffic(pairs_out, pairs_in, group),
        row_token=row_token[:num_rows],
        slot_row=slot_row.to(torch.int32),
        token_start=p.token_start,
        pair_slot=p.row_slot[:num_pairs].long(),
        pair_row=row[:num_pairs] - rank_start,
        slot_pair=slot_pair,
        coming=coming,
    )


def _at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """values[index]; -1 where the index is -1."""
    return torch.nn.functional.pad(values, (0, 1), value=-1)[index]
