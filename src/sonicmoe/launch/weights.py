"""Weights as GEMMs take them: in e4m3 or in the dtype of the data, some experts at a time."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from ..kernels import packed as kernels
from ..shapes import ceil_div
from ..tensors import E4M3, Lora, Permutation, Weight
from . import memory, quantize
from .launcher import Bound, launch

_E8M0 = torch.float8_e8m0fnu
_TILES = 256  # that a program copies


class Config(NamedTuple):
    """Words per program and warps; for the transpose, rows and columns of a tile and warps.

    H200: the transpose of 4-bit weights takes 0.60–0.75 times as long as with 128×128 and 8 warps,
    of FP8 1.03–1.05 times. The other choices are within 3% of the best, but 7% for FP8 to e4m3.
    """

    block: int = 512
    warps: int = 2
    tile: tuple[int, int] = (64, 256)
    tile_warps: int = 4


_CONFIG = Config()


@cache
def _kernel(name: str, rows: int, columns: int, format: str, config: Config) -> tuple[Bound, int]:
    """The kernel, and its programs per expert."""
    sizes = {"P": rows, "Q": columns, "FORMAT": format}
    # The product that decodes a nested scale is rounded before the sum.
    options: dict[str, Any] = {"enable_fp_fusion": False}
    if name == "quantize_transposed_kernel":
        p, q = config.tile
        options |= {"BLOCK_P": p, "BLOCK_Q": q, "num_warps": config.tile_warps}
        programs = ceil_div(rows, p) * ceil_div(columns, q)
    else:
        options |= {"BLOCK": config.block, "num_warps": config.warps}
        programs = ceil_div(rows * columns // 8, config.block)
    return Bound(getattr(kernels, name), **sizes, **options), programs


def _decode(name: str, w: Weight, out, w_scale, first: int, count: int, config) -> None:
    assert w.codes is not None and w.scale is not None and w.format is not None
    _, rows, columns = w.stored_sizes
    kernel, programs = _kernel(name, rows, columns, w.format, config)
    words = w.codes.view(-1).view(torch.int64 if w.format == "fp8" else torch.int32)
    scale = w.scale.view(torch.uint8) if w.scale.dtype == _E8M0 else w.scale
    tables = (w.table, w.scale_table, w.scale2, w.offset)
    inverse = () if w_scale is None else (w_scale,)
    launch(kernel, (programs, count), words, scale, *tables, *inverse, out, first)


def dequantize_weight(w: Weight, first, count, dtype, config=_CONFIG):
    """(count, N, K) of a packed weight, in the order in which it is stored: experts from `first`
    on. `config` is there to be measured."""
    out = memory.empty((count, *w.stored_sizes[1:]), dtype, w.device)
    _decode("dequantize_kernel", w, out, None, first, count, config)
    return out.mT if w.is_transposed else out


def quantize_packed(w: Weight, first, count, config=_CONFIG):
    """(count, N, K) of a packed weight, in e4m3."""
    out = memory.empty((count, *w.shape[1:]), E4M3, w.device)
    name = "quantize_transposed_kernel" if w.is_transposed else "quantize_packed_kernel"
    _decode(name, w, out.view(torch.int32), w.w_scale, first, count, config)
    return out


def quantize_weight(w: Weight, transposed, norms):
    """w8, w8_t, w_scale and w_norm; of a packed weight the last two, of its values in bf16."""
    if w.codes is None:
        return quantize.quantize_weight(w.dense, transposed, norms)
    found = []
    for first, count in w.ranges(torch.bfloat16):
        part = dequantize_weight(w, first, count, torch.bfloat16)
        found.append(quantize.quantize_weight(part, False, norms)[2:])
        del part
    scales, w_norms = zip(*found, strict=True)
    return None, None, torch.cat(scales), torch.cat(w_norms) if norms else None


# --- the parts of a weight ------------------------------------------------------------------------
class Part(NamedTuple):
    """The weight of some experts, and what a GEMM takes beside it.

    The tiles of `p` are those of their rows. `experts` are None if they are all.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    lora: Lora
    p: Permutation
    experts: slice | None = None

    def of(self, t: Any) -> Any:
        """The experts' part of a tensor (E, …), or None."""
        return t if t is None or self.experts is None else t[self.experts]


def parts(
    w: Weight, dtype: torch.dtype, bias, lora: Lora, p: Permutation, at_once: bool = False
) -> Iterator[Part]:
    """Yield groups of experts in `dtype`, decoded on demand; all in one if `at_once`.

    A loop deletes its part before it asks for the next one, whose memory would else add to it.
    """
    if w.codes is None or at_once or len(w.ranges(dtype)) == 1:
        yield Part(_whole(w, dtype), bias, lora, p)
        return
    for first, count in w.ranges(dtype):
        yield _part(_decoded(w, dtype, first, count), bias, lora, p, first)


def decoded_once(w: Weight, dtype: torch.dtype) -> Weight:
    """Decode a weight that has one part, for several GEMMs."""
    if w.codes is not None and len(w.ranges(dtype)) > 1:
        return w
    found = _whole(w, dtype)
    return Weight(None, found, None, w.w_scale) if dtype == E4M3 else Weight(found)


def _whole(w: Weight, dtype: torch.dtype) -> torch.Tensor:
    found = w.w8 if dtype == E4M3 else w.dense
    if found is not None:
        return found
    if w.dense is not None:
        return quantize.quantize_again(w.dense, w.w_scale)
    return _decoded(w, dtype, 0, w.shape[0])


def _decoded(w: Weight, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
    """Experts from `first` on of a packed weight."""
    if dtype == E4M3:
        return quantize_packed(w, first, count)
    return dequantize_weight(w, first, count, dtype)


def _part(weight: torch.Tensor, bias, lora: Lora, p: Permutation, first: int) -> Part:
    count = weight.shape[0]
    part = Part(weight, bias, lora, p, slice(first, first + count))
    lora = lora._replace(lora_b=part.of(lora.lora_b))
    p = p._replace(tiles=_tiles_of(p.tiles, first, count))
    return part._replace(bias=part.of(bias), lora=lora, p=p)


def _tiles_of(tiles: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """The tiles of `count` experts, which count from 0 then."""
    out, size = memory.empty(tiles.shape, torch.int32, tiles.device), len(tiles) - 1
    grid = (max(1, ceil_div(size, _TILES)),)
    launch(kernels.part_of_tiles_kernel, grid, tiles, out, first, count, size, BLOCK=_TILES)
    return out
