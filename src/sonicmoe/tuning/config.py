"""What can be chosen for a kernel, and which choices are valid."""

from dataclasses import dataclass
from typing import NamedTuple


class Target(NamedTuple):
    """The device a configuration is for: compute capability ×10 and number of multiprocessors."""

    arch: int
    processors: int
    gluon: bool = True  # whether kernels below Triton's level can run: not in the interpreter

    @property
    def has_tma(self) -> bool:
        return self.arch >= 90

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory one program may use."""
        known = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
        return 1024 * known.get(self.arch, 99)


@dataclass(frozen=True, slots=True)
class RowConfig:
    """A product with one output row for each routed row."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    tma: bool
    slices: int = 1  # pieces of the score-gradient epilogue
    programs: int = 1  # per multiprocessor
    hopper: bool = False  # the warp-specialised kernel


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """A weight gradient."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    tma: bool
    programs: int = 1
    hopper: bool = False


def tile_rows(itemsize: int) -> int:
    """M: rows of a tile of every row product, one for the whole layer: one schedule serves all."""
    return 32 if itemsize > 2 else 128


def is_valid(
    config: RowConfig | WeightConfig, itemsize: int, target: Target, kernel: str = ""
) -> bool:
    """Whether the device can run it: shared memory, registers, and what the kernels assume.

    kernel: 'up', 'down', 'dx' or 'dz' for a row product.
    """
    powers = (config.block_m, config.block_n, config.block_k, config.warps)
    if any(p <= 0 or p & (p - 1) for p in powers) or config.block_k < 16 or config.stages < 2:
        return False
    if config.tma and not target.has_tma:
        return False
    if shared_bytes(config, itemsize, kernel) > target.shared_memory:
        return False
    accumulators = config.block_m * config.block_n // (32 * config.warps)
    if accumulators > 128:
        return False
    if config.hopper and (
        target.arch != 90 or not target.gluon or itemsize != 2 or config.warps != 8
        or config.block_m not in (128, 256) or config.block_n not in (128, 256)
        or config.block_k not in (32, 64)
    ):  # fmt: skip
        return False
    if isinstance(config, WeightConfig):
        return True
    if config.block_m != tile_rows(itemsize):
        return False
    return config.slices in (1, 2, 4) and config.block_n // config.slices >= 16


def shared_bytes(config: RowConfig | WeightConfig, itemsize: int, kernel: str) -> int:
    """The ring of operands and, in Hopper kernels, what is on its way out."""
    blocks = config.stages
    if isinstance(config, RowConfig) and itemsize > 2:
        blocks = 2 * (config.stages - 1)  # two products are added up before they join the sum
    ring = blocks * (config.block_m + config.block_n) * config.block_k * itemsize
    if not config.hopper:
        return ring
    tile = config.block_m * config.block_n * itemsize
    if kernel == "dz":
        leaving = 80 * 1024  # slices of Z and dZ, and of A'
    elif kernel == "up" or isinstance(config, WeightConfig):
        leaving = tile // 2  # two pieces of four
    else:
        leaving = tile
    return ring + leaving + 1024
