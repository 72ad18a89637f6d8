"""Launches of the decoders of packed weights, and the parts of a weight that exist at once."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from ..kernels import packed as kernels
from ..shapes import ceil_div
from ..tensors import E4M3, Fp8Weight, Lora, Packed, Permutation
from . import memory
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


def _decode(name: str, packed: Packed, out, w_scale, first: int, count: int, config) -> None:
    rows, columns, format = packed.stored_rows, packed.stored_columns, packed.format
    kernel, programs = _kernel(name, rows, columns, format, config)
    words = packed.codes.view(-1).view(torch.int64 if format == "fp8" else torch.int32)
    scale = packed.scale.view(torch.uint8) if packed.scale.dtype == _E8M0 else packed.scale
    tables = (packed.table, packed.scale_table, packed.scale2, packed.offset)
    inverse = () if w_scale is None else (w_scale,)
    launch(kernel, (programs, count), words, scale, *tables, *inverse, out, first)


def dequantize_weight(packed: Packed, first, count, dtype, config=_CONFIG):
    """`config` is there to be measured."""
    shape = (count, packed.stored_rows, packed.stored_columns)
    out = memory.empty(shape, dtype, packed.device)
    _decode("dequantize_kernel", packed, out, None, first, count, config)
    return out.mT if packed.is_transposed else out


def quantize_packed(packed: Packed, first, count, config=_CONFIG):
    """w8 (count, N, K) of `Fp8Weight`."""
    out = memory.empty((count, *packed.shape[1:]), E4M3, packed.device)
    name = "quantize_transposed_kernel" if packed.is_transposed else "quantize_packed_kernel"
    words = out.view(torch.int32)
    _decode(name, packed, words, packed.fp8_scale, first, count, config)
    return out


# --- the parts of a weight ------------------------------------------------------------------------
class Part(NamedTuple):
    """A weight, a tensor or an `Fp8Weight`, of some experts, and what a GEMM takes beside it.

    The tiles of `p` are those of their rows. `experts` are None if they are all.
    """

    weight: Any
    bias: torch.Tensor | None
    lora: Lora
    p: Permutation
    experts: slice | None = None

    def of(self, t: Any) -> Any:
        """The experts' part of a tensor (E, …), or None."""
        return t if t is None or self.experts is None else t[self.experts]


def parts(
    w: torch.Tensor | Packed, bias, lora: Lora, p: Permutation, dtype: torch.dtype
) -> Iterator[Part]:
    """Of a packed weight, each decoded when it is its turn; a tensor is a part as it is.

    A loop deletes its part before it asks for the next one, whose memory would else add to it.
    """
    if not isinstance(w, Packed):
        yield Part(w, bias, lora, p)
        return
    for first, count in w.parts(dtype):
        yield _part(w, dequantize_weight(w, first, count, dtype), bias, lora, p, first)


def fp8_parts(
    w: Fp8Weight | Packed, bias, lora: Lora, p: Permutation, at_once: bool = False
) -> Iterator[Part]:
    """As `parts`, with w8 and its scales alone; in one part if `at_once`."""
    if not isinstance(w, Packed):
        yield Part(w, bias, lora, p)
        return
    for first, count in [(0, w.experts)] if at_once else w.parts(E4M3):
        yield _part(w, _quantized(w, first, count), bias, lora, p, first)


def decoded_once(w: torch.Tensor | Packed, dtype: torch.dtype) -> torch.Tensor | Packed:
    """For several GEMMs with a weight: in `dtype` if it has one part, else still packed."""
    if isinstance(w, Packed) and len(w.parts(dtype)) == 1:
        return dequantize_weight(w, 0, w.experts, dtype)
    return w


def fp8_decoded_once(w: Fp8Weight | Packed) -> Fp8Weight | Packed:
    if isinstance(w, Packed) and len(w.parts(E4M3)) == 1:
        return _quantized(w, 0, w.experts)
    return w


def _quantized(w: Packed, first: int, count: int) -> Fp8Weight:
    assert w.fp8_scale is not None
    scale = w.fp8_scale[first : first + count]
    return Fp8Weight(quantize_packed(w, first, count), None, scale)


def _part(w: Packed, weight, bias, lora: Lora, p: Permutation, first: int) -> Part:
    count = weight.shape[0]
    if count == w.experts:
        return Part(weight, bias, lora, p)
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
