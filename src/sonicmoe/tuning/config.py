"""Configurations of the grouped GEMM kernels, and which of them a device can run."""

from dataclasses import dataclass
from typing import NamedTuple


class Target(NamedTuple):
    """The device a configuration is for: compute capability × 10 and number of SMs."""

    arch: int
    processors: int
    gluon: bool = True  # whether Gluon kernels can run: not in the interpreter

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
    """Configuration of a grouped GEMM with one output row for each routed row."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    tma: bool
    slices: int = 1  # column slices of the dZ epilogue
    programs: int = 1  # per SM
    hopper: bool = False  # the warp-specialized kernel


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Configuration of a weight gradient; see `RowConfig`."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    tma: bool
    programs: int = 1
    hopper: bool = False


def tile_m(itemsize: int) -> int:
    """Rows of a tile, the same for all row GEMMs of a layer, so that they share one tile table."""
    return 32 if itemsize > 2 else 128


def is_valid(
    config: RowConfig | WeightConfig, itemsize: int, target: Target, kernel: str = ""
) -> bool:
    """Whether `target` can run `config`: shared memory, registers, assumptions of the kernels.

    kernel: 'up', 'down', 'dx' or 'dz' for a `RowConfig`.
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
        target.arch != 90
        or not target.gluon
        or itemsize != 2
        or config.warps != 8
        or config.block_m not in (128, 256)
        or config.block_n not in (128, 256)
        or config.block_k not in (32, 64)
    ):
        return False
    if isinstance(config, WeightConfig):
        return True
    if config.block_m != tile_m(itemsize):
        return False
    return config.slices in (1, 2, 4) and config.block_n // config.slices >= 16


def shared_bytes(config: RowConfig | WeightConfig, itemsize: int, kernel: str) -> int:
    """Shared memory of a kernel: the ring buffer and, on Hopper, the output buffers."""
    blocks = config.stages
    if isinstance(config, RowConfig) and itemsize > 2:
        blocks = 2 * (config.stages - 1)  # fp32 is unrolled twice, see triton.tile
    ring = blocks * (config.block_m + config.block_n) * config.block_k * itemsize
    if not config.hopper:
        return ring
    tile = config.block_m * config.block_n * itemsize
    if kernel == "dz":
        output = 80 * 1024  # slices of Z, dZ and A'
    elif kernel == "up" or isinstance(config, WeightConfig):
        output = tile // 2  # two of four pieces
    else:
        output = tile
    return ring + output + 1024
