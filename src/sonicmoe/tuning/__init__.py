"""Which kernel configuration runs: a pure function of shape class and device."""

from .select import tile_height

__all__ = ["tile_height"]
