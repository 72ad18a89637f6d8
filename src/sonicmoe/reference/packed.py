"""Packed weights in plain PyTorch: see `tensors.Packed`. One expert at a time, to save memory."""

import torch

from ..shapes import BLOCK
from ..tensors import Fp8Weight, Packed
from .quantize import to_e4m3

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BLOCK = {"mxfp4": 32, "nf4": 64, "int4": 32}  # weights that share a scale
NESTED_BLOCK = 256  # scales of NF4 that share one


def dequantize_weight(packed: Packed, first: int, count: int, dtype: torch.dtype):
    """(count, N, K) in `dtype`: experts from `first` on."""
    out = torch.empty(
        count, packed.stored_rows, packed.stored_columns, dtype=dtype, device=packed.device
    )
    for i in range(count):
        out[i] = _values(packed, first + i)
    return out.mT if packed.is_transposed else out


class Decoded:
    """Experts (N, K) in `dtype`, each decoded when it is asked for."""

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        self.packed, self.dtype, self.shape = packed, dtype, packed.shape

    def __getitem__(self, e: int) -> torch.Tensor:
        return dequantize_weight(self.packed, e, 1, self.dtype)[0]


def decodable(w, dtype: torch.dtype):
    """Weights of which w[e] is those of expert e in `dtype`."""
    return Decoded(w, dtype) if isinstance(w, Packed) else w


def fp8_weight(packed: Packed) -> Fp8Weight:
    """What `quantize_weight` makes of the weight in bf16; its scales and norms are known."""
    assert packed.fp8_scale is not None
    w = dequantize_weight(packed, 0, packed.experts, torch.bfloat16)
    q = to_e4m3(w.float() / packed.fp8_scale[:, None, None]).contiguous()
    return Fp8Weight(q, q.mT.contiguous(), packed.fp8_scale, packed.fp8_norm)


def _values(packed: Packed, e: int) -> torch.Tensor:
    """Expert e (P, Q) in fp32, or in fp64 where fp32 could overflow."""
    rows, columns = packed.stored_rows, packed.stored_columns
    if packed.format == "fp8":
        scale = packed.scale[e].float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return packed.codes[e].float() * scale[:rows, :columns]
    size = rows * columns
    codes = packed.codes.view(-1).view(torch.uint8)[e * size // 2 : (e + 1) * size // 2]
    low, high = codes & 15, codes >> 4
    pair = (high, low) if packed.format == "nf4" else (low, high)
    nibbles = torch.stack(pair, 1).flatten().long()
    scale = _scales(packed, e * size, size)
    if packed.format == "mxfp4":
        table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=codes.device).double()
        values = table[nibbles] * scale
    elif packed.format == "nf4":
        assert packed.table is not None
        values = packed.table[nibbles] * scale
    else:
        values = (nibbles - 8).float() * scale
    return values.view(rows, columns)


def _scales(packed: Packed, first: int, size: int) -> torch.Tensor:
    """Of `size` flat elements from `first` on."""
    block = SCALE_BLOCK[packed.format]
    blocks = slice(first // block, (first + size + block - 1) // block)
    scale = packed.scale.view(-1)[blocks]
    if packed.format == "mxfp4":
        scale = (scale.double() - 127).exp2()
    elif packed.scale_table is not None:
        assert packed.scale2 is not None and packed.offset is not None
        number = torch.arange(blocks.start, blocks.stop, device=scale.device)
        nested = packed.scale2[number // NESTED_BLOCK]
        scale = packed.scale_table[scale.long()] * nested + packed.offset
    else:
        scale = scale.float()
    start = first % block
    return scale.repeat_interleave(block)[start : start + size]
