"""Precompile the kernels of a training step side by side, when the first of them is missing.

One after the other they take 18 s, side by side 5 s (H200, 16 cores).
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager

import torch

from ..errors import say_once
from ..launch.thread_state import thread_state
from .meta import Example, meta_steps

Report = Callable[[int, int, float], None]  # compiled kernels, all of them, seconds


class Step:
    """A training step of the experts that runs in this thread, as long as somebody holds it.

    The launcher calls `precompile` when it lacks a kernel.
    """

    __slots__ = ("__weakref__", "example")

    def __init__(self, example: Example) -> None:
        self.example = example
        thread_state.step = weakref.ref(self)

    def precompile(self, index: int) -> None:
        """What fails here is no error yet: the step compiles what it lacks, and raises with
        context."""
        thread_state.step = type(thread_state).step
        try:
            compile_together(lambda: meta_steps(self.example), index)
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
