"""Every figure of one subject."""

import torch

from .. import cost
from ..shapes import Problem
from .kernels import busy_ms
from .memory import MIB, measure_memory
from .subjects import Subject
from .timing import is_cuda, median_ms


def measure(subject: Subject, p: Problem) -> dict[str, float | None]:
    """Times in ms, rates in TFLOP/s of the layer's products, memory in MiB."""
    device = subject.dout.device
    subject.forward_backward()
    memory = measure_memory(subject)
    forward = median_ms(subject.forward, device)
    both = median_ms(subject.forward_backward, device, rep_ms=400)
    figures: dict[str, float | None] = dict(times(p, forward, both - forward))
    if is_cuda(device):
        figures["busy_fwd_ms"] = busy_ms(subject.forward, device)
        figures["busy_fwd_bwd_ms"] = busy_ms(subject.forward_backward, device)
        torch.cuda.empty_cache()
    for name in ("kept", "peak_forward", "peak"):
        size = getattr(memory, name)
        figures[f"{name}_mib"] = None if size is None else size / MIB
    return figures


def times(p: Problem, forward: float, backward: float) -> dict[str, float]:
    """A backward pass is timed as forward and backward less forward."""
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
