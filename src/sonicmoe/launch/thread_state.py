"""Per-thread state: autograd runs the backward pass in threads of its own."""

import threading
from typing import Any


class _ThreadState(threading.local):
    has_cuda_context = False  # whether this thread has called CUDA
    dry_run: list[Any] | None = None  # kernels launched on the meta device, instead of compiled


thread_state = _ThreadState()
