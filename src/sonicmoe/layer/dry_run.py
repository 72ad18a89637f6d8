"""Which kernels a call of the experts would launch, without data, memory or a compiler."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..launch.thread_state import thread_state
from .meta import BATCHES, Example, Slots, meta_backward, meta_forward, on_meta, without_data
from .options import Options
from .prepare import check
from .weights import ExpertWeights


class DryRun(NamedTuple):
    """The backend, the dtype of the data, and the kernels of both passes; none in PyTorch."""

    backend: str
    dtype: torch.dtype
    forward: tuple[Any, ...] = ()
    backward: tuple[Any, ...] = ()


def dry_run(weights: ExpertWeights, k: int, options: Options) -> DryRun:
    """A training step of `experts` on a long batch, or a forward pass where gradients are off.

    Raises the ValueError that a call would raise.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports sympy, which takes seconds

    w, training = weights.up.weight, torch.is_grad_enabled()
    with FakeTensorMode():  # its tensors are on a device, without memory
        x = torch.empty((1, w.shape[2]), dtype=w.dtype, device=w.device, requires_grad=training)
        options, weights = without_data(options, _empty), without_data(weights, _empty)
        x, weights, backend = check(x, weights, options)
    if backend != "triton":
        return DryRun(backend, x.dtype)
    ids, scores = (torch.empty((1, k), dtype=d) for d in (torch.int32, torch.float32))
    slots = Slots(ids, scores.requires_grad_(training))
    example = on_meta(Example(x, slots, weights, options))
    # In a thread of its own it is out of sight of the caller's modes, such as a FLOP counter.
    with ThreadPoolExecutor(1) as apart:
        kernels = apart.submit(_kernels, example, x.device, training).result()
    return DryRun(backend, x.dtype, *kernels)


def _empty(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _kernels(
    example: Example, device: torch.device, training: bool
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    with torch.set_grad_enabled(training), _noted(device) as forward:
        out = meta_forward(example, BATCHES[-1])
    with _noted(device) as backward:
        if out.requires_grad:
            meta_backward(out)
    return tuple(forward), tuple(backward)


@contextmanager
def _noted(device: torch.device) -> Iterator[list[Any]]:
    """The list of kernels that this thread launches on the meta device, as if on `device`."""
    kernels: list[Any] = []
    thread_state.dry_run = kernels
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield kernels
    finally:
        thread_state.dry_run = None
