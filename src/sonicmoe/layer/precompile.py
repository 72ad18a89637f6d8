"""Precompile the kernels of a layer side by side, before the first of them is needed.

The layer itself runs, on tensors of the meta device, where a launch compiles a kernel and starts
nothing. One after the other the kernels of a training step take 18 s, side by side 5 s (H200, 16
cores).
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from .. import ops
from ..enums import ActivationType
from ..errors import say_once
from ..tensors import Packed
from .main_grad import with_main_grad
from .memory import KEEP, MemoryPolicy
from .nodes import run_backward
from .run import Call, permute, run
from .weights import ExpertWeights, Projection

# Tokens of a short and of a long batch: some kernels run in one of them alone. Nothing else that is
# compiled depends on their number.
BATCHES = (8, 2048)
Report = Callable[[int, int, float], None]  # compiled kernels, all of them, seconds


class Layer(NamedTuple):
    """What the kernels of the experts are compiled for."""

    hidden: int
    intermediate: int
    experts: int
    k: int  # experts per token; 0 where tokens differ
    dtype: torch.dtype = torch.bfloat16
    activation: ActivationType = ActivationType.SWIGLU
    gate_up: str = "interleaved"
    bias: tuple[bool, bool] = (False, False)  # b1, b2
    transposed: tuple[bool, bool] = (False, False)  # W1, W2: (E, K, N) in memory
    main_grad: tuple[bool, bool] = (False, False)  # W1, W2
    ids: torch.dtype = torch.int32
    logits: torch.dtype | None = None  # where the auxiliary loss follows
    weights: torch.dtype | None = None  # where it is not that of the data
    precision: str | None = None
    memory: MemoryPolicy = KEEP


def precompile_step(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: ExpertWeights,
    backend: str,
    logits: torch.dtype | None = None,
    precision: str | None = None,
    memory: MemoryPolicy = KEEP,
) -> None:
    """Precompile a training step of the experts with these arguments, once per kind of layer.

    `logits` is the dtype of the router's logits where the auxiliary loss follows.
    """
    (w1, b1, *_), (w2, b2, *_), activation, gate_up = weights
    if isinstance(w1, Packed) or isinstance(w2, Packed):
        return
    training = torch.is_grad_enabled() and w1.requires_grad
    if not training or not x.is_cuda or backend != "triton":
        return
    # A fake tensor is on a GPU that need not exist, and its kernels never run.
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        return
    number, hidden, intermediate = w2.shape
    layer = Layer(
        hidden,
        intermediate,
        number,
        ids.shape[1] if ids.dim() == 2 else 0,
        x.dtype,
        activation,
        gate_up,
        bias=(b1 is not None, b2 is not None),
        transposed=(w1.stride(2) != 1, w2.stride(2) != 1),
        main_grad=(with_main_grad(w1) is not None, with_main_grad(w2) is not None),
        ids=ids.dtype,
        logits=logits,
        weights=None if w1.dtype == x.dtype else w1.dtype,
        precision=precision,
        memory=memory,
    )
    _precompile_once(x.get_device(), layer)


@cache
def _precompile_once(index: int, layer: Layer) -> None:
    """What fails here is no error yet: the step compiles what it lacks, and raises with context."""
    try:
        compile_together(lambda: run_step(layer), index)
    except Exception as error:
        say_once(
            "kernels are compiled one by one, since compiling them side by side failed: "
            f"{type(error).__name__}: {error}"
        )


def compile_together(run: Callable[[], object], index: int, report: Report | None = None) -> None:
    """All kernels that `run` launches on the meta device, for GPU `index`."""
    # In a thread of its own `run` is out of sight of the caller's modes, hooks and profiler.
    with ThreadPoolExecutor(1) as apart:
        apart.submit(_compile_together, run, index, report).result()


def _compile_together(run: Callable[[], object], index: int, report: Report | None) -> None:
    import triton

    begin = time.perf_counter()
    with (
        _few_switches(),
        torch.cuda.device(index),
        ThreadPoolExecutor(_threads()) as pool,
        triton.AsyncCompileMode(pool) as mode,
    ):
        run()
        loads = []
        for number, kernel in enumerate(as_completed(mode.raw_futures), 1):
            loads.append(pool.submit(_load, kernel.result(), index))
            if report:
                report(number, len(mode.raw_futures), time.perf_counter() - begin)
        for load in loads:
            load.result()


_compiling = threading.Lock()


@contextmanager
def _few_switches() -> Iterator[None]:
    """Switch threads twenty times less often, so that the first kernels leave Triton's front end,
    which is Python, long before the last: 6.2 → 5.4 s for all."""
    with _compiling:  # by one thread at a time: the interval is the process's
        before = sys.getswitchinterval()
        sys.setswitchinterval(0.1)
        try:
            yield
        finally:
            sys.setswitchinterval(before)


def _load(kernel, index: int) -> None:
    """Triton compiles a kernel's launcher, in C, and loads both, when `run` is read."""
    with torch.cuda.device(index):
        _ = kernel.run


def _threads() -> int:
    """A fair share of the cores for each process of this machine."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


# --- what runs ------------------------------------------------------------------------------------
def logits_of(layer: Layer, tokens: int) -> torch.Tensor:
    return _new(tokens, layer.experts, dtype=layer.dtype)


class Slots(NamedTuple):
    """The routing, as `prepare.routed` takes it."""

    ids: torch.Tensor
    scores: torch.Tensor
    slot_token: torch.Tensor | None = None
    token_start: torch.Tensor | None = None


def run_experts(layer: Layer, tokens: int, slots: Slots | None = None) -> torch.Tensor:
    """The forward pass."""
    ids, scores, slot_token, token_start = slots or _slots(layer, tokens)
    hidden, intermediate, number = layer[:3]
    columns = 2 * intermediate if layer.activation.is_gated else intermediate
    sizes = ((number, columns, hidden), (number, hidden, intermediate))
    up, down = (
        Projection(
            _weight(size, layer.weights or layer.dtype, transposed, main_grad),
            _new(*size[:2], dtype=layer.dtype) if bias else None,
        )
        for size, transposed, main_grad, bias in zip(
            sizes, layer.transposed, layer.main_grad, layer.bias, strict=True
        )
    )
    x = _new(tokens, hidden, dtype=layer.dtype)
    weights = ExpertWeights(up, down, layer.activation, layer.gate_up)
    p = permute(
        ids,
        number,
        slot_token=slot_token,
        tokens=tokens,
        token_start=token_start,
        dtype=layer.dtype,
        backend="triton",
    )
    scores = scores.to(torch.promote_types(layer.dtype, torch.float32))
    return run(Call(x, scores, weights, p, layer.precision, layer.memory, "triton"))


def run_step(layer: Layer) -> None:
    """Training steps of the experts, and of the auxiliary loss where it follows.

    The nodes are called one by one: `backward()` imports sympy first, which takes 2.9 s, and no
    kernel of the backward pass is compiled until then.
    """
    for tokens in BATCHES:
        out = run_experts(layer, tokens)
        dout = _new(*out.shape, dtype=out.dtype)
        with torch.no_grad():
            run_backward(out, dout)
            if layer.logits is not None:
                logits = _new(tokens, layer.experts, dtype=layer.logits)
                counts = torch.empty(layer.experts, dtype=torch.int32, device="meta")
                loss, slope = ops.balance(logits, counts, 1.0, 0.0, "triton")
                ops.balance_backward(loss, slope, logits, 0.0, "triton")


def _slots(layer: Layer, tokens: int) -> Slots:
    if layer.k:
        ids = torch.empty((tokens, layer.k), dtype=layer.ids, device="meta")
        return Slots(ids, _new(*ids.shape, dtype=torch.float32))
    ids = torch.empty(2 * tokens, dtype=layer.ids, device="meta")
    token = torch.empty(2 * tokens, dtype=torch.int32, device="meta")
    start = torch.empty(tokens + 1, dtype=torch.int32, device="meta")
    return Slots(ids, _new(*ids.shape, dtype=torch.float32), token, start)


def _new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def _weight(
    shape: tuple[int, int, int], dtype: torch.dtype, transposed: bool, main_grad: bool
) -> torch.Tensor:
    experts, n, k = shape
    stored = _new(experts, k, n, dtype=dtype).mT if transposed else _new(*shape, dtype=dtype)
    weight = torch.nn.Parameter(stored.detach())
    if main_grad:
        buffer = torch.empty_strided(shape, weight.stride(), dtype=torch.float32, device="meta")
        setattr(weight, "main_grad", buffer)  # noqa: B010
    return weight
