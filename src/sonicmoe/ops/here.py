"""What is known of the thread at hand: autograd has threads of its own."""

import threading
from typing import Any


class _Here(threading.local):
    knows_the_gpu = False  # whether CUDA was called: see `launch`
    recording: Any = None  # of the operator at work: see `recipe`


here = _Here()
