"""Where routed rows come from and where they go."""

from typing import NamedTuple

import torch


class Permutation(NamedTuple):
    """Where each routed row comes from and where it goes. Rows are sorted by expert.

    row_token     (R,)    row  -> token
    row_slot      (R,)    row  -> flat (token, k) slot
    slot_row      (S,)    slot -> row, the inverse; -1 where the slot's expert is not here
    token_start   (T+1,)  slots of token t are [start[t], start[t+1]); None: K slots each
    counts        (E,)    rows of each expert
    expert_start  (E+1,)  rows of expert e are [start[e], start[e+1])
    tiles         (1+n,4) row 0: (number of tiles, rows of the longest expert, 1 if the offsets of
                  `grouped_experts` were out of bounds, 0); row 1+i: of tile i (expert, the expert's
                  first and end row, number among the expert's tiles)
    tile_m        rows of a tile

    The first five are None for rows that arrive sorted: row i is token i there.

    Tensors are int32. R = S is the size of the buffers; rows at or past expert_start[E] are not in
    use and hold nothing to be trusted. Within an expert, rows keep the order of their slots.

    T=3, K=1, E=2, ids=[1, 0, 1]: row_token=[1, 0, 2], expert_start=[0, 1, 3].
    """

    row_token: torch.Tensor | None
    row_slot: torch.Tensor | None
    slot_row: torch.Tensor | None
    token_start: torch.Tensor | None
    counts: torch.Tensor | None
    expert_start: torch.Tensor
    tiles: torch.Tensor
    tile_m: int

    @classmethod
    def of_sorted_rows(
        cls, expert_start: torch.Tensor, tiles: torch.Tensor, tile_m: int
    ) -> "Permutation":
        return cls(None, None, None, None, None, expert_start, tiles, tile_m)

    @property
    def is_gathered(self) -> bool:
        """Whether rows are gathered from tokens; otherwise they arrive sorted by expert."""
        return self.row_token is not None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All fields but the last, for `save_for_backward`."""
        return self[:-1]

    def rows_of(self, x: torch.Tensor) -> int:
        """R, where x (T, H) are the tokens, or (R, H) the sorted rows."""
        return (x if self.row_token is None else self.row_token).shape[0]
