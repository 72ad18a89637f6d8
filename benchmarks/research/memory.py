"""Memory of one call: bytes kept for the backward pass, and the peak."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from sonicmoe.tools.candidates import Candidate

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on top of what was allocated before the call; peaks are None on a CPU."""

    kept: int
    peak_forward: int | None
    peak: int | None


def saved_bytes(
    forward: Callable[[], torch.Tensor], beside: Iterable[torch.Tensor]
) -> tuple[int, torch.Tensor]:
    """Bytes of the distinct storages saved by autograd, except those of `beside`; the output."""
    owned = {t.untyped_storage().data_ptr() for t in beside}
    held: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in owned:
            held[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()
    return sum(held.values()), out


def measure_memory(candidate: Candidate) -> Memory:
    """Call the candidate once before, so that one-time allocations are not counted."""
    if not candidate.dout.is_cuda:
        beside = (*candidate.leaves.values(), candidate.dout)
        return Memory(saved_bytes(candidate.forward, beside)[0], None, None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = candidate.forward()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before - out.untyped_storage().nbytes()
    peak_forward = torch.cuda.max_memory_allocated() - before
    candidate.gradients(out)
    torch.cuda.synchronize()
    return Memory(kept, peak_forward, torch.cuda.max_memory_allocated() - before)
