"""Tokens of each step: a pure function of seed and step, so no state is saved.

The text is cut into windows of `context` tokens; every epoch visits all of them once in its own
order.
"""

import functools
from collections.abc import Iterator

import torch


class Batches:
    """Inputs and targets, each (sequences, context) int64, of any step."""

    def __init__(self, tokens: torch.Tensor, context: int, batch: int, seed: int) -> None:
        self.tokens = tokens
        self.context = context
        self.batch = batch
        self.seed = seed
        self.windows = (tokens.numel() - 1) // context

    def step(self, step: int, rank: int = 0, world: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The share of `rank` in the batch of `step`."""
        first = step * self.batch
        mine = range(first + rank, first + self.batch, world)
        return self._read([self._window(i) for i in mine])

    def spread(self, sequences: int, at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """At most `sequences` windows, evenly spread over the text, the same at every call."""
        count = min(sequences, self.windows)
        chosen = [i * self.windows // count for i in range(count)]
        for i in range(0, count, at_once):
            yield self._read(chosen[i : i + at_once])

    def _window(self, sample: int) -> int:
        epoch, position = divmod(sample, self.windows)
        return int(_order(self.windows, self.seed, epoch)[position])

    def _read(self, windows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        span = torch.arange(self.context + 1)
        start = torch.tensor(windows) * self.context
        taken = self.tokens[start[:, None] + span].long()
        return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()


@functools.lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(windows, generator=generator)
