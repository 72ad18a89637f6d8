"""(kernel, dtype, sizes, device) → configuration. Pure, over tables of measurements."""

from functools import cache

import torch

from .config import RowConfig, Target, WeightConfig


def tile_height(dtype: torch.dtype, backend: str) -> int:
    """M: rows of a tile of every row product, one for the whole layer so that one schedule serves."""
    return 32 if dtype.itemsize > 2 else 128


@cache
def row_config(kernel: str, itemsize: int, K: int, N: int, target: Target) -> RowConfig:
    """kernel: 'up', 'down', 'dx' or 'score_gradient'; the product is (rows, K) × (K, N)."""
    if itemsize > 2:
        return RowConfig(32, 64, 32, warps=4, stages=2, tma=False, programs=2)
    if target.arch // 10 != 9:
        if target.shared_memory < 128 * 1024:
            return RowConfig(128, 64, 32, warps=4, stages=3, tma=False, slices=1)
        return RowConfig(128, 128, 64, warps=8, stages=3, tma=False, slices=2)
    if kernel == "score_gradient":
        if N >= 256:
            return RowConfig(128, 256, 64, warps=8, stages=3, tma=True, slices=4)
        return RowConfig(128, 128, 64, warps=8, stages=4, tma=True, slices=2)
    if N >= 256:
        return RowConfig(128, 256, 64, warps=8, stages=3, tma=True)
    return RowConfig(128, 128, 64, warps=8, stages=4, tma=True)


@cache
def weight_config(itemsize: int, M: int, N: int, target: Target) -> WeightConfig:
    """The gradient is (M, N) for each expert."""
    if itemsize > 2:
        return WeightConfig(64, 64, 32, warps=4, stages=2, tma=False, programs=2)
    if target.arch // 10 != 9:
        return WeightConfig(128, 64, 32, warps=4, stages=3, tma=False, programs=2)
    return WeightConfig(128, 128, 64, warps=8, stages=3, tma=True, programs=2)
