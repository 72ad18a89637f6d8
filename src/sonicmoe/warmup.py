"""Compile what a layer runs, all kernels side by side, before the first of them is needed.

The launch code runs as it is, on tensors of the meta device: a launch there compiles and runs
nothing. One after the other the kernels of a training step take 18 s (H200, 16 cores).
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from functools import cache, partial
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import ops
from .enums import ActivationType
from .errors import bad_argument
from .tuning import tile_height
from .validation import check_activation, check_gate_up, check_k

_TOKENS = 64  # nothing that is compiled depends on the number of tokens


class Layer(NamedTuple):
    """All that the kernels of a layer are compiled for."""

    hidden: int
    intermediate: int
    experts: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    activation: ActivationType = ActivationType.SWIGLU
    concatenated: bool = False
    bias: bool = False
    transposed: tuple[bool, bool] = (False, False)  # W1, W2: (E, K, N) in memory


def warmup(
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    num_experts_per_tok: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    activation: ActivationType = ActivationType.SWIGLU,
    gate_up: str = "interleaved",
    add_bias: bool = False,
    softmax_over_topk: bool = True,
    device: str | torch.device = "cuda",
    progress: bool = True,
) -> float:
    """Compile the kernels of a forward and a backward pass; returns the seconds it took.

    Weights are taken as (E, N, K) in memory. No memory of the device is needed.
    """
    check_activation(activation)
    check_gate_up(gate_up)
    check_k(num_experts_per_tok, num_experts, "num_experts_per_tok")
    device = torch.device(device)
    if device.type != "cuda":
        raise bad_argument("device", "a GPU", device, "On the CPU there is nothing to compile.")
    begin = time.perf_counter()
    layer = Layer(
        hidden_size, intermediate_size, num_experts, num_experts_per_tok, dtype, activation,
        gate_up == "concatenated", add_bias,
    )  # fmt: skip
    index = torch.cuda.current_device() if device.index is None else device.index

    def everything() -> None:
        run_router(layer, softmax_over_topk)
        run_experts(layer, training=True)
        run_experts(layer, training=False)

    compile_together(everything, index, _say if progress else None)
    return time.perf_counter() - begin


@cache
def compile_ahead(index: int, layer: Layer) -> None:
    """Once for a kind of layer, when its first training step begins."""
    compile_together(partial(run_experts, layer, training=True), index)


def compile_together(
    run: Callable[[], None],
    index: int,
    report: Callable[[int, int, float], None] | None = None,
) -> None:
    """All kernels that `run` launches on the meta device, for GPU `index`."""
    # Triton's mode outlives a failed compilation in the context that entered it.
    copy_context().run(_compile_together, run, index, report)


def _compile_together(run, index, report) -> None:
    import triton

    begin = time.perf_counter()
    with (
        torch.cuda.device(index),
        _disable_current_modes(),  # nobody shall count what only compiles
        ThreadPoolExecutor(_threads()) as pool,
    ):
        with triton.AsyncCompileMode(pool) as mode:
            run()
            for number, _ in enumerate(as_completed(mode.raw_futures), 1):
                if report:
                    report(number, len(mode.raw_futures), time.perf_counter() - begin)
        kernels = [future.result() for future in mode.future_kernels.values()]
        list(pool.map(partial(_load, index), kernels))


def _load(index: int, kernel) -> None:
    """Triton compiles the launcher of a kernel, in C, and loads the kernel, when `run` is read."""
    with torch.cuda.device(index):
        _ = kernel.run


def _threads() -> int:
    """A fair share of the cores for each process of this machine, at most one for each kernel."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _say(number: int, of: int, seconds: float) -> None:
    print(f"sonicmoe: compiled {number} of {of} kernels, {seconds:.1f} s", file=sys.stderr)


# --- what runs ------------------------------------------------------------------------------------
def _new(*shape: int, dtype: torch.dtype, transposed: bool = False) -> torch.Tensor:
    if transposed:
        return _new(shape[0], shape[2], shape[1], dtype=dtype).mT
    return torch.empty(shape, dtype=dtype, device="meta")


def run_router(layer: Layer, softmax_over_topk: bool) -> None:
    logits = _new(_TOKENS, layer.experts, dtype=layer.dtype)
    scores, ids = ops.topk(logits, layer.k, softmax_over_topk, "triton")
    ops.topk_backward(scores, scores, ids, logits, softmax_over_topk, "triton")


def run_experts(layer: Layer, training: bool) -> None:
    """A step through the operators; those that take longest to compile come first."""
    hidden, intermediate, experts, k = layer[:4]
    new = partial(_new, dtype=layer.dtype)
    rows = _TOKENS * k
    columns = 2 * intermediate if layer.activation.is_gated else intermediate
    height = tile_height(layer.dtype, "triton")
    act = (layer.activation.value, layer.concatenated)
    x, y = new(_TOKENS, hidden), new(rows, hidden)
    z, a = new(rows, columns), new(rows, intermediate)
    w1 = new(experts, columns, hidden, transposed=layer.transposed[0])
    w2 = new(experts, hidden, intermediate, transposed=layer.transposed[1])
    b1, b2 = (new(experts, columns), new(experts, hidden)) if layer.bias else (None, None)
    scores = _new(_TOKENS, k, dtype=torch.promote_types(layer.dtype, torch.float32))

    ids = _new(_TOKENS, k, dtype=torch.int32)
    row_token, row_slot, slot_row, start, tiles, _ = ops.permute(
        ids, experts, None, height, "triton"
    )
    where = (start, tiles, height)
    if training:
        ops.down_backward(
            x, z, w2, b2, scores, row_token, row_slot, slot_row, *where, *act,
            True, True, layer.bias, True, "triton",
        )  # fmt: skip
        ops.up_backward(
            z, x, w1, row_token, slot_row, None, *where, True, True, layer.bias, "triton"
        )
    ops.up(x, w1, b1, row_token, *where, *act, training, "triton")
    ops.down(a, w2, b2, None, *where, False, "triton")
    ops.aggregate(y, scores, slot_row, None, _TOKENS, "triton")
