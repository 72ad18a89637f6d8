"""Router statistics for logging, as tensors on the device: only reading them synchronizes."""

from dataclasses import dataclass

import torch

from .base import Routing


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    """Statistics of one router call, as tensors on its device.

    rows             (E,) rows of each expert
    entropy          mean over the tokens of the entropy of softmax(logits), in nats
    dropped, added   rows by which experts have fewer, or more, than by plain top-K, summed
    padding_before   share of padding in the tiles with the rows of plain top-K
    padding_after    share of padding in the tiles with the rows after routing
    """

    rows: torch.Tensor
    entropy: torch.Tensor
    dropped: torch.Tensor
    added: torch.Tensor
    padding_before: torch.Tensor
    padding_after: torch.Tensor


@torch.no_grad()
def statistics(routing: Routing, tile: int = 128) -> RouterStatistics:
    """Return what to log about one router call; padding fills tiles of `tile` rows."""
    rows, choice = routing.counts(), routing.choice_counts()
    log_share = routing.logits.float().log_softmax(-1)
    entropy = -(log_share.exp() * log_share).sum() / max(len(log_share), 1)
    return RouterStatistics(
        rows=rows,
        entropy=entropy,
        dropped=(choice - rows).clamp_min(0).sum(),
        added=(rows - choice).clamp_min(0).sum(),
        padding_before=_padding(choice, tile),
        padding_after=_padding(rows, tile),
    )


def _padding(rows: torch.Tensor, tile: int) -> torch.Tensor:
    padded = ((rows + tile - 1) // tile * tile).sum()
    return torch.where(padded > 0, 1 - rows.sum() / padded.clamp_min(1), 0.0)
