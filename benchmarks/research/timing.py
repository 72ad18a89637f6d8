"""Median time of a call, host time until it returns, interleaved timing."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
ROUNDS = 5


def is_cuda(device: str | torch.device) -> bool:
    return torch.device(device).type == "cuda"


def synchronize(device: str | torch.device) -> None:
    if is_cuda(device):
        torch.cuda.synchronize()


def median_ms(call: Callable[[], object], device: str | torch.device, rep_ms: int = 200) -> float:
    """Median ms: on a GPU by events, with L2 flushed before each call; else by wall clock."""
    if is_cuda(device):
        from triton.testing import do_bench

        return do_bench(call, warmup=50, rep=rep_ms, return_mode="median")
    call()
    return statistics.median(_clocked(call, device, budget_s=rep_ms / 1e3, least=3))


def interleaved(
    timers: Mapping[Key, Callable[[], float]], rounds: int = ROUNDS
) -> dict[Key, float]:
    """Median of each timer over rounds that run all of them, so that clock drift cancels out.

    Every other round runs backwards: no timer always follows the same one.
    """
    found: dict[Key, list[float]] = {key: [] for key in timers}
    for number in range(rounds):
        order = list(timers.items())
        for key, timer in order if number % 2 == 0 else reversed(order):
            found[key].append(timer())
    return {key: statistics.median(values) for key, values in found.items()}


def host_ms(
    call: Callable[[], object], device: str | torch.device, calls: int = 200, queued: int = 10
) -> float:
    """Median time until a call returns, call after call as in training.

    Synchronizes every `queued` calls, since a full launch queue would block the host.
    """
    times, before = [], calls // 10
    for number in range(before + calls):
        if number % queued == 0:
            synchronize(device)
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    synchronize(device)
    return 1e3 * statistics.median(times[before:])


def wall_ms(call: Callable[[], object], device: str | torch.device) -> float:
    """Wall-clock time of one call, until the device is done."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def _clocked(
    call: Callable[[], object], device: str | torch.device, budget_s: float, least: int
) -> list[float]:
    times: list[float] = []
    while len(times) < least or sum(times) < 1e3 * budget_s:
        times.append(wall_ms(call, device))
    return times
