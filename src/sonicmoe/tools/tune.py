"""Find the fastest configuration of a GEMM: check each, then time them interleaved.

A configuration must agree with the default element by element, with all buffers filled with NaN
before. All are timed round by round, each relative to the default of the same round, so that
clock drift cancels out. The best of many is partly luck, so it is compared with the default once
more, and only that comparison counts.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ..launch import memory
from ..tuning import Target
from ..tuning.candidates import candidates
from ..tuning.table import Config, Key
from .gemms import Gemm

MIN_GAIN = 0.02  # smaller gains are noise
ROUNDS = 5

Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was measured for one GEMM. `times` holds ms; `faults` why a candidate has none."""

    name: str
    key: Key
    flops: int
    default: Config
    best: Config
    default_ms: float
    best_ms: float
    gain: float  # share of the default's time that the best saves, median of the rounds
    times: dict[Config, float]
    faults: dict[Config, str]

    @property
    def chosen(self) -> Config:
        return self.best if self.gain >= MIN_GAIN else self.default

    @property
    def replaces(self) -> bool:
        return self.chosen != self.default


def gpu_timer(call: Callable[[], object]) -> float:
    """Median ms, L2 flushed before each call; short, since there are several rounds."""
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=40, return_mode="median")


def tune(gemm: Gemm, target: Target, timer: Timer = gpu_timer) -> Finding:
    default, *others = candidates(gemm.key, target)
    with _poisoned():
        want = gemm.run(default)
    if not all(t.isfinite().all() for t in want):
        raise RuntimeError(f"{gemm.name}: the default configuration gives no finite result")
    faults: dict[Config, str] = {}
    right = [default]
    for config in others:
        fault = _fault(gemm, config, want)
        if fault:
            faults[config] = fault
        else:
            right.append(config)
    del want

    def round_of(configs: list[Config]) -> list[float]:
        return [timer(partial(gemm.run, config)) for config in configs]

    rounds = [round_of(right) for _ in range(ROUNDS)]
    times = dict(zip(right, map(statistics.median, zip(*rounds, strict=True)), strict=True))
    ratios = zip(*([ms / turn[0] for ms in turn] for turn in rounds), strict=True)
    best = min(zip(map(statistics.median, ratios), right, strict=True), key=lambda pair: pair[0])[1]
    about = (gemm.name, gemm.key, gemm.flops, default, best)
    if best == default:
        return Finding(*about, times[best], times[best], 0.0, times, faults)
    duel = [round_of([default, best]) for _ in range(ROUNDS)]
    default_ms, best_ms = map(statistics.median, zip(*duel, strict=True))
    gain = 1 - statistics.median(ms / base for base, ms in duel)
    return Finding(*about, default_ms, best_ms, gain, times, faults)


def describe(config: Config) -> str:
    kind = "Hopper" if config.hopper else "Triton"
    tile = f"{config.block_m}×{config.block_n}×{config.block_k}"
    return f"{kind} {tile}, {config.stages} stages" + (", plain loads" if not config.tma else "")


def _fault(gemm: Gemm, config: Config, want: tuple[torch.Tensor, ...]) -> str | None:
    """Why `config` cannot be chosen; None if it is right."""
    try:
        with _poisoned():
            got = gemm.run(config)
        wrong = [i for i, (g, w) in enumerate(zip(got, want, strict=True)) if not _agree(g, w)]
    except Exception as error:  # of the compiler or the launch: the others can still be measured
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return f"differs from the default in result {wrong[0]}" if wrong else None


def _agree(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether they differ by at most two rounding steps: the order of fp32 sums differs."""
    if got.shape != want.shape:
        return False
    near_zero = 1e-4 * torch.linalg.vector_norm(want, dtype=torch.float32) / want.numel() ** 0.5
    step = 2 * torch.finfo(want.dtype).eps
    at_once = max(1, 2**26 * want.shape[0] // want.numel())  # bounds the fp32 copies
    pieces = zip(got.split(at_once), want.split(at_once), strict=True)
    right = [
        ((g.float() - w.float()).abs() <= step * w.float().abs() + near_zero).all()  # False for NaN
        for g, w in pieces
    ]
    return bool(torch.stack(right).all())


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """Fill every buffer of the operators with NaN: reused memory may hold the last result."""
    originals = {name: getattr(memory, name) for name in ("empty", "empty_like")}

    def filled(make):
        def poisoned(*args):
            t = make(*args)
            return t.fill_(math.nan) if t.is_floating_point() else t

        return poisoned

    try:
        for name, make in originals.items():
            setattr(memory, name, filled(make))
        yield
    finally:
        for name, make in originals.items():
            setattr(memory, name, make)
