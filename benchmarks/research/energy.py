"""Energy of a layer's GEMMs and of dense cuBLAS, from the energy counter of the board.

Where the board is at its power limit, the time of a layer is its energy over that power.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sonicmoe.errors import bad_argument
from sonicmoe.tools.gemms import gemms
from sonicmoe.tools.inputs import Inputs

from .dense import dense_gemms

_LIBRARY = "libnvidia-ml.so.1"  # comes with the driver
_SM_CLOCK = 1
_BURST_S = 0.1  # of work that is queued while the burst before it runs
_MOST_CALLS = 400  # of a burst, however short: beyond its queue the driver makes the host wait
_LOOK_S = 0.01  # between looks at the counters


@dataclass(frozen=True, slots=True)
class Energy:
    """One GEMM called repeatedly: its time, and the power and clock of the board meanwhile."""

    name: str
    flops: int
    ms: float
    watts: float
    mhz: float

    @property
    def millijoules(self) -> float:
        return self.watts * self.ms

    @property
    def picojoules_per_flop(self) -> float:
        return 1e9 * self.millijoules / self.flops


class Board:
    """The counters of one GPU."""

    def __init__(self, device: str | torch.device) -> None:
        try:
            self._nvml = ctypes.CDLL(_LIBRARY)
            self._handle = ctypes.c_void_p()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._ask("nvmlInit_v2")
            self._ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), self._handle)
            self.joules()
        except (OSError, AttributeError, RuntimeError, ValueError, AssertionError) as why:
            raise bad_argument(
                "--instead energy", "an NVIDIA GPU whose driver counts energy (Volta and newer)",
                f"{device}: {why}", "Leave it out.",
            ) from why  # fmt: skip

    def joules(self) -> float:
        """Since the driver was loaded. The counter moves some ten times a second."""
        value = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle, value)
        return value.value / 1e3

    def mhz(self) -> int:
        value = ctypes.c_uint()
        self._ask("nvmlDeviceGetClockInfo", self._handle, _SM_CLOCK, value)
        return value.value

    def _ask(self, name: str, *arguments) -> None:
        """Results are asked for by passing the place that they go to, which is `arguments[-1]`."""
        if arguments:
            arguments = (*arguments[:-1], ctypes.byref(arguments[-1]))
        error = getattr(self._nvml, name)(*arguments)
        if error:
            raise RuntimeError(f"{name} gave error {error}")


def energies(inputs: Inputs, gate_up: str) -> Iterator[tuple[Energy, Energy]]:
    """Each grouped GEMM of a case, and the dense GEMM with the same FLOPs."""
    board = Board(inputs.x.device)
    dense = dense_gemms(inputs.case.problem, inputs.x.device, inputs.x.dtype)
    for gemm in gemms(inputs, gate_up)[0]:
        calls = (lambda gemm=gemm: gemm.run(None)), dense[gemm.name]
        ours, theirs = (measure(gemm.name, gemm.flops, call, board) for call in calls)
        yield ours, theirs


def measure(
    name: str, flops: int, call: Callable[[], object], board: Board, seconds: float = 0.6
) -> Energy:
    """Settle for `seconds`, then measure for as long.

    Without a pause, so that power and clock are those of this call alone.
    """
    call()  # may compile, which is no measure of a burst
    burst = min(_MOST_CALLS, max(1, round(_BURST_S / _repeat(call, 3))))
    _repeat(call, burst, seconds)  # until the clock has settled
    with Watch(board) as seen:
        each = _repeat(call, burst, seconds)
    return Energy(name, flops, 1e3 * each, watts(seen.edges), sum(seen.clocks) / len(seen.clocks))


class Watch:
    """Records when the energy counter moved and how far, and the clock then, while it is entered.

    In a thread: a look takes up to 5 ms, in which the host would start no kernels, and a layer that
    the host limits would look slower.
    """

    def __init__(self, board: Board) -> None:
        self.edges: list[tuple[float, float]] = []
        self.clocks: list[int] = []
        self._board, self._done = board, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(_LOOK_S):
            joules = self._board.joules()
            if not self.edges or joules != self.edges[-1][1]:
                self.edges.append((time.perf_counter(), joules))
                self.clocks.append(self._board.mhz())


def watts(edges: Sequence[tuple[float, float]]) -> float:
    """Power from the moments at which the counter moved; the first look is no such moment."""
    moved = edges[1:]
    if len(moved) < 2:
        raise RuntimeError(f"the energy counter moved {len(moved)} times: measure for longer")
    (begin, before), (end, after) = moved[0], moved[-1]
    return (after - before) / (end - begin)


def _repeat(call: Callable[[], object], burst: int, seconds: float = 0.0) -> float:
    """Seconds of one call; a burst is queued while the one before it runs."""
    first = previous = _mark()
    begin, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - begin < seconds:
        for _ in range(burst):
            call()
        calls += burst
        last = _mark()
        previous.synchronize()
        previous = last
    last.synchronize()
    return first.elapsed_time(last) / calls / 1e3


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
