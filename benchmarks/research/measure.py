"""Figures of a candidate: memory, kernel time, and times interleaved with others."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from sonicmoe.shapes import Problem
from sonicmoe.tools import cost
from sonicmoe.tools.candidates import Candidate

from .kernels import busy_ms
from .memory import MIB, measure_memory
from .timing import ROUNDS, Key, interleaved, is_cuda, median_ms


class Timers(NamedTuple):
    """Each call measures once and returns milliseconds."""

    forward: Callable[[], float]
    both: Callable[[], float]  # forward and backward


def timers(
    forward: Callable[[], object],
    both: Callable[[], object],
    device: str | torch.device,
    rep_ms: int = 100,
) -> Timers:
    return Timers(*(partial(median_ms, call, device, rep_ms) for call in (forward, both)))


def timers_of(candidate: Candidate) -> Timers:
    return timers(candidate.forward, candidate.forward_backward, candidate.dout.device)


def time_interleaved(
    p: Problem, contenders: Mapping[Key, Timers], rounds: int = ROUNDS
) -> dict[Key, dict[str, float]]:
    """Times of each in ms, and TFLOP/s of the layer's GEMMs."""
    each = {
        (key, name): timer
        for key, pair in contenders.items()
        for name, timer in pair._asdict().items()
    }
    found = interleaved(each, rounds)
    return {
        key: times(p, found[key, "forward"], found[key, "both"] - found[key, "forward"])
        for key in contenders
    }


def needs(candidate: Candidate) -> dict[str, float | None]:
    """Memory in MiB, and on a GPU the milliseconds its kernels are busy."""
    device = candidate.dout.device
    candidate.forward_backward()
    memory = measure_memory(candidate)
    figures: dict[str, float | None] = {}
    if is_cuda(device):
        figures["busy_fwd_ms"] = busy_ms(candidate.forward, device)
        figures["busy_fwd_bwd_ms"] = busy_ms(candidate.forward_backward, device)
        torch.cuda.empty_cache()
    for name in ("kept", "peak_forward", "peak"):
        size = getattr(memory, name)
        figures[f"{name}_mib"] = None if size is None else size / MIB
    return figures


def measure(candidate: Candidate, p: Problem) -> dict[str, float | None]:
    """All figures of a single candidate."""
    needed = needs(candidate)
    return (
        dict(time_interleaved(p, {candidate.name: timers_of(candidate)})[candidate.name]) | needed
    )


def times(p: Problem, forward: float, backward: float) -> dict[str, float]:
    """`backward` is the time of both passes minus that of the forward pass."""
    work, work_back = cost.forward_flops(p), cost.backward_flops(p)
    return {
        "fwd_ms": forward,
        "bwd_ms": backward,
        "fwd_bwd_ms": forward + backward,
        "fwd_tflops": _tflops(work, forward),
        "bwd_tflops": _tflops(work_back, backward),
        "fwd_bwd_tflops": _tflops(work + work_back, forward + backward),
    }


def _tflops(flops: int, ms: float) -> float:
    return flops / max(ms, 1e-6) / 1e9
