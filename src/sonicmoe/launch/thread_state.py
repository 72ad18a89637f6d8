"""Per-thread state: autograd runs the backward pass in threads of its own."""

import threading


class _ThreadState(threading.local):
    has_cuda_context = False  # whether this thread has called CUDA


thread_state = _ThreadState()
