"""Which kernels a call of the experts would launch, without data, memory or a compiler.

The layer itself runs: its checks on tensors of the right device that hold one number, its launches
on the meta device, where they only note the kernel.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..launch.thread_state import thread_state
from . import prepare
from .lora import LowRank
from .memory import KEEP, MemoryPolicy
from .nodes import run_backward
from .run import run
from .weights import ExpertWeights, Projection

TOKENS = 2048


class DryRun(NamedTuple):
    """The backend, the dtype of the data, and the kernels of both passes; none in PyTorch."""

    backend: str
    dtype: torch.dtype
    forward: tuple[Any, ...] = ()
    backward: tuple[Any, ...] = ()


def dry_run(
    weights: ExpertWeights,
    k: int,
    *,
    lora: tuple[LowRank | None, LowRank | None] = (None, None),
    precision: str | None = None,
    memory: MemoryPolicy = KEEP,
) -> DryRun:
    """A training step of `experts` where gradients are enabled, else a forward pass.

    Raises the ValueError that a call would raise.
    """
    given, w = weights, weights.up.weight
    x = _one_number((TOKENS, w.shape[2]), w.dtype, w.device, torch.is_grad_enabled())
    weights = weights._replace(
        up=_without_data(weights.up, any(lora)), down=_without_data(weights.down, any(lora))
    )
    x, weights, backend = prepare.check(x, weights, lora, precision, None)
    if backend != "triton":
        return DryRun(backend, x.dtype)
    given_to = (x, given, weights, k, lora, precision, memory, torch.is_grad_enabled())
    # In a thread of its own it is out of sight of the caller's modes, such as a FLOP counter.
    with ThreadPoolExecutor(1) as apart:
        return DryRun(backend, x.dtype, *apart.submit(_kernels, *given_to).result())


def _kernels(
    x: torch.Tensor,
    given: ExpertWeights,
    weights: ExpertWeights,
    k: int,
    lora: tuple[LowRank | None, LowRank | None],
    precision: str | None,
    memory: MemoryPolicy,
    training: bool,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of both passes, for checked x and weights without data, laid out as the `given` ones."""
    device = x.device
    x = _meta(x, (x.shape[1], 1))
    up = _meta_projection(weights.up, given.up)
    down = _meta_projection(weights.down, given.down)
    weights = weights._replace(up=up, down=down)
    ids = torch.empty((TOKENS, k), dtype=torch.int32, device="meta")
    scores = torch.empty(
        (TOKENS, k), dtype=torch.float32, device="meta", requires_grad=x.requires_grad
    )
    options: Any = {"precision": precision, "memory": memory, "backend": "triton"}
    with torch.set_grad_enabled(training), _noted(device) as forward:
        adapters = _meta_adapter(lora[0]), _meta_adapter(lora[1])
        call = prepare.routed(x, ids, scores, weights, lora=adapters, **options)
        out = run(call)
    with torch.no_grad(), _noted(device) as backward:
        if out.requires_grad:
            run_backward(out, _meta(out, out.stride()))
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


def _one_number(shape, dtype, device, requires_grad: bool) -> torch.Tensor:
    """A tensor of this shape that takes the memory of one number."""
    t = torch.empty((), dtype=dtype, device=device).expand(shape)
    return t.requires_grad_() if requires_grad and dtype.is_floating_point else t


def _without_data(w: Projection, has_adapter: bool) -> Projection:
    def like(t):
        if not isinstance(t, torch.Tensor):  # None, or packed: `check` reads no values
            return t
        one = torch.empty((), dtype=t.dtype, device=t.device)
        if has_adapter:  # `check` casts these, which must not fill them
            (one,) = prepare.autocast(one)
        return _one_number(t.shape, one.dtype, t.device, t.requires_grad)

    return w._replace(weight=like(w.weight), bias=like(w.bias))


def _meta(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    empty = torch.empty_strided(t.shape, strides, dtype=t.dtype, device="meta")
    return empty.requires_grad_(t.requires_grad)


def _meta_projection(checked: Projection, given: Projection) -> Projection:
    """`checked` on the meta device, laid out as `given`, also with its `main_grad`."""
    if not isinstance(given.weight, torch.Tensor):  # packed
        weight: Any = given.weight.to("meta")
    else:
        weight = _meta(checked.weight, given.weight.stride())
        weight.requires_grad_(given.weight.requires_grad)
    main_grad = getattr(given.weight, "main_grad", None)
    if main_grad is not None:
        weight.main_grad = _meta(main_grad, main_grad.stride())
    bias = None
    if checked.bias is not None and given.bias is not None:
        bias = torch.empty(checked.bias.shape, dtype=checked.bias.dtype, device="meta")
        bias.requires_grad_(given.bias.requires_grad)
    return Projection(weight, bias)


def _meta_adapter(adapter: LowRank | None) -> LowRank | None:
    if adapter is None:
        return None
    a, b = (_meta(t, t.stride()) for t in (adapter.a, adapter.b))
    return adapter._replace(a=a, b=b)
