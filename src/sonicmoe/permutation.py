"""Where routed rows come from and where they go."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Permutation:
    """Where each routed row comes from and where it goes. Rows are sorted by expert.

    row_token     (R,)    row  -> token
    row_slot      (R,)    row  -> flat (token, k) slot
    slot_row      (S,)    slot -> row, the inverse; -1 where the slot's expert is not here
    expert_start  (E+1,)  rows of expert e are [start[e], start[e+1])
    token_start   (T+1,)  slots of token t are [start[t], start[t+1]); None: K slots each
    tiles         (1+n,4) row 0: (number of tiles, rows of the longest expert, 1 if the offsets of
                  `grouped_experts` were out of bounds, 0); row 1+i: of tile i (expert, the expert's
                  first and end row, number among the expert's tiles)
    counts        (E,)    rows of each expert

    row_token, row_slot, slot_row and counts are None for rows that arrive sorted: row i is token i
    there.

    All int32. R = S is the size of the buffers; rows at or past expert_start[E] are not in use and
    hold nothing to be trusted. Within an expert, rows keep the order of their slots.

    T=3, K=1, E=2, ids=[1, 0, 1]: row_token=[1, 0, 2], expert_start=[0, 1, 3].
    """

    row_token: torch.Tensor | None
    row_slot: torch.Tensor | None
    slot_row: torch.Tensor | None
    expert_start: torch.Tensor
    tiles: torch.Tensor
    token_start: torch.Tensor | None
    tile_height: int
    counts: torch.Tensor | None

    @property
    def rows(self) -> int:
        assert self.row_slot is not None  # sorted rows bring their number themselves
        return self.row_slot.shape[0]

    @property
    def num_experts(self) -> int:
        return self.expert_start.shape[0] - 1
