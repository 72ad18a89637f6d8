"""Per-thread state: autograd runs the backward pass in threads of its own."""

import threading
from collections.abc import Callable
from typing import Any


class _ThreadState(threading.local):
    has_cuda_context = False  # whether this thread has called CUDA
    dry_run: list[Any] | None = None  # kernels launched on the meta device, instead of compiled
    # The step of `layer.precompile` that runs, or None once it is over.
    step: Callable[[], Any] = staticmethod(lambda: None)


thread_state = _ThreadState()
