"""Weights as GEMMs take them: see `tensors.Weight`. One expert at a time, to save memory."""

import torch

from ..shapes import BLOCK
from ..tensors import E4M3, Weight
from . import quantize

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BLOCK = {"mxfp4": 32, "nf4": 64, "int4": 32}  # weights that share a scale
NESTED_BLOCK = 256  # scales of NF4 that share one


def dequantize_weight(w: Weight, first: int, count: int, dtype: torch.dtype):
    """(count, N, K) of a packed weight, in the order in which it is stored: experts from `first`
    on."""
    out = torch.empty(count, *w.stored_sizes[1:], dtype=dtype, device=w.device)
    for i in range(count):
        out[i] = _values(w, first + i)
    return out.mT if w.is_transposed else out


def quantize_weight(w: Weight, transposed, norms):
    """w8, w8_t, w_scale and w_norm; of a packed weight the last two, of its values in bf16."""
    if w.codes is None:
        return quantize.quantize_weight(w.dense, transposed, norms)
    found = []
    for first, count in w.ranges(torch.bfloat16):
        dense = dequantize_weight(w, first, count, torch.bfloat16)
        found.append(quantize.quantize_weight(dense, False, norms)[2:])
    scales, w_norms = zip(*found, strict=True)
    return None, None, torch.cat(scales), torch.cat(w_norms) if norms else None


class Decoded:
    """Experts (N, K) in `dtype`, each decoded when it is asked for."""

    def __init__(self, w: Weight, dtype: torch.dtype) -> None:
        self.w, self.dtype, self.shape = w, dtype, w.shape

    def __getitem__(self, e: int) -> torch.Tensor:
        return dequantize_weight(self.w, e, 1, self.dtype)[0]


def decoded(w: Weight, dtype: torch.dtype):
    """(E, N, K) in `dtype`, by [e] at least."""
    if dtype == E4M3:
        return _in_e4m3(w)
    return Decoded(w, dtype) if w.dense is None else w.dense


def _in_e4m3(w: Weight) -> torch.Tensor:
    if w.w8 is not None:
        return w.w8
    dense = w.dense
    if dense is None:
        dense = dequantize_weight(w, 0, w.shape[0], torch.bfloat16)
    return quantize.quantize_again(dense, w.w_scale)


def _values(w: Weight, e: int) -> torch.Tensor:
    """Expert e (P, Q) in fp32, or in fp64 where fp32 could overflow."""
    assert w.codes is not None and w.scale is not None
    _, rows, columns = w.stored_sizes
    if w.format == "fp8":
        scale = w.scale[e].float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return w.codes[e].float() * scale[:rows, :columns]
    size = rows * columns
    codes = w.codes.view(-1).view(torch.uint8)[e * size // 2 : (e + 1) * size // 2]
    low, high = codes & 15, codes >> 4
    pair = (high, low) if w.format == "nf4" else (low, high)
    nibbles = torch.stack(pair, 1).flatten().long()
    scale = _scales(w, e * size, size)
    if w.format == "mxfp4":
        table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=codes.device).double()
        values = table[nibbles] * scale
    elif w.format == "nf4":
        assert w.table is not None
        values = w.table[nibbles] * scale
    else:
        values = (nibbles - 8).float() * scale
    return values.view(rows, columns)


def _scales(w: Weight, first: int, size: int) -> torch.Tensor:
    """Of `size` flat elements from `first` on."""
    assert w.scale is not None and w.format is not None
    block = SCALE_BLOCK[w.format]
    blocks = slice(first // block, (first + size + block - 1) // block)
    scale = w.scale.view(-1)[blocks]
    if w.format == "mxfp4":
        scale = (scale.double() - 127).exp2()
    elif w.scale_table is not None:
        assert w.scale2 is not None and w.offset is not None
        number = torch.arange(blocks.start, blocks.stop, device=scale.device)
        nested = w.scale2[number // NESTED_BLOCK]
        scale = w.scale_table[scale.long()] * nested + w.offset
    else:
        scale = scale.float()
    start = first % block
    return scale.repeat_interleave(block)[start : start + size]
