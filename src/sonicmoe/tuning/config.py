"""What can be chosen for a kernel, and which choices are valid."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """The device a configuration is for: compute capability ×10 and number of multiprocessors."""

    arch: int
    processors: int

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
    flatten: bool = False  # prefetch the next tile under the epilogue
    programs: int = 1  # per multiprocessor
    gather_first: bool = False  # rows are copied together first, then read by the copy engine


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """A weight gradient."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    tma: bool
    flatten: bool = False
    programs: int = 1
    gather_first: bool = False


def is_valid(config: RowConfig | WeightConfig, itemsize: int, target: Target) -> bool:
    """Whether the device can run it: shared memory, registers, and what the kernels assume."""
    powers = (config.block_m, config.block_n, config.block_k, config.warps)
    if any(p & (p - 1) for p in powers) or config.block_k < 16:
        return False
    if config.tma and not target.has_tma:
        return False
    if config.gather_first and not config.tma:
        return False
    ring = config.stages * (config.block_m + config.block_n) * config.block_k * itemsize
    if ring > target.shared_memory:
        return False
    accumulators = config.block_m * config.block_n // (32 * config.warps)
    if accumulators > 128:
        return False
    if isinstance(config, RowConfig):
        return config.slices in (1, 2, 4) and config.block_n // config.slices >= 16
    return True
