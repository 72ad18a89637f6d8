"""Settings that must be the same on every rank, sent along with the counts of rows and pairs.

They add columns to an exchange that happens anyway. Every rank sees the settings of all ranks, so
all of them raise the same error, before any row is sent.
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..enums import ActivationType
from ..errors import bad_argument
from ..ops.kinds import precisions
from ..validation import LAYOUTS

_COUNTS = 2
# A setting that is not a number is sent as -1 - (its index in this list), or as a checksum below.
_VOCABULARY: list[Any] = [
    None,
    False,
    True,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    *ActivationType,
    *LAYOUTS,
    *precisions(),
]


class Settings(NamedTuple):
    """What a rank sends to the others; None if `dispatch` was called without the experts."""

    experts_per_rank: int
    hidden_size: int
    x_dtype: torch.dtype
    scores_dtype: torch.dtype
    # These decide which exchanges the backward pass makes.
    x_requires_grad: bool
    scores_requires_grad: bool
    output_requires_grad: bool | None = None
    intermediate_size: int | None = None
    activation: ActivationType | None = None
    gate_up: str | None = None
    has_b1: bool | None = None
    has_b2: bool | None = None
    precision: str | None = None


def exchange_counts(
    counts: torch.Tensor, settings: Settings, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, list[list[int]]]:
    """Send row r of counts (ranks, 2) to rank r; raise if the ranks' settings differ.

    Returns the received counts, and on the host four columns: rows sent, pairs sent, rows received,
    pairs received. Waits for the device once.
    """
    coming = _exchange(counts, [0, *map(_encode, settings)], group)
    host = torch.cat([counts, coming], dim=1).tolist()
    failed = [rank for rank, line in enumerate(host) if line[2 * _COUNTS]]
    if failed:
        raise bad_argument(
            "arguments",
            "valid ones on every rank",
            f"an error on {_ranks(failed)}",
            "See the message of that rank.",
        )
    for i, name in enumerate(Settings._fields, 2 * _COUNTS + 1):
        by_value: dict[int, list[int]] = {}
        for rank, line in enumerate(host):
            by_value.setdefault(line[i], []).append(rank)
        if len(by_value) > 1:
            found = ", ".join(f"{_decode(v)} on {_ranks(r)}" for v, r in by_value.items())
            raise bad_argument(
                name,
                "the same on every rank",
                found,
                "Ranks may differ in their tokens, not in the layer.",
            )
    columns = [list(column) for column in zip(*host, strict=True)]
    return coming[:, :_COUNTS], columns[: 2 * _COUNTS]


@contextlib.contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None, *tensors: Any) -> Iterator[None]:
    """If the body raises on this rank, make the other ranks raise in `exchange_counts`.

    This rank then takes part in that exchange, on the device of the first of `tensors`, with a
    flag instead of counts; else the others would wait for it.
    """
    try:
        yield
    except Exception:
        devices = [t.device for t in tensors if isinstance(t, torch.Tensor) and not t.is_meta]
        # If the exchange fails as well, the first error is the one to report.
        with contextlib.suppress(Exception):
            counts = torch.zeros(
                dist.get_world_size(group), _COUNTS, dtype=torch.long, device=devices[0]
            )
            _exchange(counts, [1, *(0 for _ in Settings._fields)], group)
        raise


def _exchange(counts: torch.Tensor, header: list[int], group: dist.ProcessGroup | None):
    # From pinned memory the copy does not wait for the device.
    line = torch.tensor(header, device="cpu", pin_memory=counts.is_cuda)
    line = line.to(counts.device, non_blocking=True)
    leaving = torch.cat([counts, line.expand(len(counts), -1)], dim=1)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=group)
    return coming


def _encode(setting: Any) -> int:
    if isinstance(setting, int) and not isinstance(setting, bool):
        return setting
    if setting in _VOCABULARY:
        return -1 - _VOCABULARY.index(setting)
    return -1 - len(_VOCABULARY) - zlib.crc32(str(setting).encode())


def _decode(code: int) -> Any:
    if code >= 0:
        return code
    return _VOCABULARY[-1 - code] if -code <= len(_VOCABULARY) else "another value"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
