"""GPU time of the kernels of one call, from the profiler: no host overhead."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from .timing import is_cuda, synchronize


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    calls: float  # in one call of the candidate
    ms: float  # in one call of the candidate, all launches together


def kernels(call: Callable[[], object], device: str | torch.device, calls: int = 5) -> list[Kernel]:
    """Kernels of a call, longest first; without a GPU, PyTorch's operators."""
    on_gpu = is_cuda(device)
    call()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(calls):
            call()
        synchronize(device)
    found = []
    for event in seen.key_averages():
        if on_gpu and not str(event.device_type).endswith("CUDA"):
            continue
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if total > 0:
            found.append(Kernel(event.key, event.count / calls, total / calls / 1e3))
    return sorted(found, key=lambda kernel: -kernel.ms)


def busy_ms(call: Callable[[], object], device: str | torch.device) -> float:
    return sum(kernel.ms for kernel in kernels(call, device))
