import torch


def tile_height(dtype: torch.dtype, backend: str) -> int:
    """M: rows of a tile of every row product, one for the whole layer so that one schedule serves."""
    return 64 if dtype.itemsize > 2 else 128
