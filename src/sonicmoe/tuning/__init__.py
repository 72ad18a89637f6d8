"""Which kernel configuration runs: a pure function of shape class and device."""

from .config import RowConfig, Target, WeightConfig, is_valid, tile_m
from .select import row_config, weight_config

__all__ = [
    "RowConfig",
    "Target",
    "WeightConfig",
    "is_valid",
    "row_config",
    "tile_m",
    "weight_config",
]
