"""The configurations that `sonicmoe tune` measures, the default first."""

from collections.abc import Iterator
from dataclasses import replace

from .config import RowConfig, Target, WeightConfig
from .select import default_row_config, default_weight_config
from .table import Config, Key, RowKey, WeightKey, allowed


def default_config(key: Key, target: Target) -> Config:
    if isinstance(key, RowKey):
        return default_row_config(key.kernel, key.itemsize, key.K, key.N, target)
    return default_weight_config(key.itemsize, key.M, key.N, key.gather_right, target)


def candidates(key: Key, target: Target) -> list[Config]:
    tiles: Iterator[Config]
    tiles = _row_tiles(key, target) if isinstance(key, RowKey) else _weight_tiles(key, target)
    found = [default_config(key, target)]
    for config in tiles:
        found += _stages(key, config, target)
    return list(dict.fromkeys(found))


def _stages(key: Key, config: Config, target: Target) -> list[Config]:
    """As many stages as fit, and half as many; trying more would only cost compile time."""
    most = 8 if config.hopper else 4
    fitting = [s for s in range(2, most + 1) if allowed(key, replace(config, stages=s), target)]
    if not fitting:
        return []
    depths = sorted({fitting[-1], max(2, (fitting[-1] + 1) // 2)}, reverse=True)
    return [replace(config, stages=stages) for stages in depths]


def _row_tiles(key: RowKey, target: Target) -> Iterator[RowConfig]:
    default = default_row_config(key.kernel, key.itemsize, key.K, key.N, target)
    for hopper, tma, depths in _variants(key, target):
        slices = default.slices
        if key.kernel == "dz" and not hopper:
            slices = max(slices, 2)
        for n in (64, 128) if _small(key, target) else (128, 256):
            if n == 256 and key.N <= 128:
                continue
            for k in depths:
                yield replace(default, block_n=n, block_k=k, tma=tma, hopper=hopper, slices=slices)


def _weight_tiles(key: WeightKey, target: Target) -> Iterator[WeightConfig]:
    default = default_weight_config(key.itemsize, key.M, key.N, key.gather_right, target)
    wide = 128 if _small(key, target) else 256
    for hopper, tma, depths in _variants(key, target):
        for m, n in ((wide, wide // 2), (wide // 2, wide), (wide // 2, wide // 2)):
            if (m == 256 and key.M <= 128) or (n == 256 and key.N <= 128):
                continue
            for k in depths:
                yield replace(
                    default,
                    block_m=m,
                    block_n=n,
                    block_k=k,
                    tma=tma,
                    hopper=hopper,
                    warps=8 if hopper or m * n > 64 * 128 else 4,
                    programs=1 if hopper or m * n > 128 * 128 else 2,
                )


def _small(key: Key, target: Target) -> bool:
    return key.itemsize > 2 or target.shared_memory < 128 * 1024


def _variants(key: Key, target: Target) -> list[tuple[bool, bool, tuple[int, ...]]]:
    """(Hopper kernel or not, TMA or not, values of BLOCK_K) to try."""
    if key.itemsize > 2 or not target.has_tma:
        return [(False, False, (32, 64))]
    if target.arch == 90 and target.gluon:
        # Portable kernels seldom win against those for Hopper: docs/log/grouped-gemm.md.
        return [(True, True, (32, 64)), (False, True, (64,))]
    if target.arch == 90:
        return [(False, True, (32, 64))]
    return [(False, False, (32, 64)), (False, True, (32, 64))]
