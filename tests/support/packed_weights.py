"""Packed weights of random bits, and decoders written from the definitions of the formats."""

import math
from typing import Any

import torch

from sonicmoe import Fp8Blocks, Int4, Mxfp4, Nf4
from sonicmoe.packed import NestedAbsmax, PackedWeight

# bitsandbytes/backends/utils.py: quantiles of a normal distribution.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
FORMATS = ("mxfp4", "nf4", "nf4 nested", "fp8", "fp8 e8m0", "int4")


def random_packed(
    format: str, shape: tuple[int, ...], transposed: bool = False, seed: int = 0
) -> Any:
    """Codes of every value; scales near 1/√K, so that layers compute numbers of ordinary size."""
    generator = torch.Generator().manual_seed(seed)
    experts, n, k = shape
    rows, columns = (k, n) if transposed else (n, k)
    small = math.log2(k) / 2

    def integers(low: int, high: int, *size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator).to(dtype)

    def scales(*size: int) -> torch.Tensor:
        return (torch.rand(size, generator=generator) + 0.5) * 2**-small

    if format == "mxfp4":
        blocks = integers(0, 256, experts, rows, columns // 32, 16, dtype=torch.uint8)
        middle = 125 - round(small)
        exponents = integers(middle - 5, middle + 3, *blocks.shape[:3], dtype=torch.uint8)
        return Mxfp4(blocks, exponents, transposed)
    if format == "int4":
        words = integers(-(2**31), 2**31, experts, rows, columns // 8, dtype=torch.int32)
        return Int4(words, (scales(experts, rows, columns // 32) / 8).bfloat16(), transposed)
    if format.startswith("nf4"):
        size = experts * rows * columns
        codes, code = integers(0, 256, size // 2, dtype=torch.uint8), torch.tensor(NF4)
        if format == "nf4":
            return Nf4(codes, scales(size // 64), (experts, n, k), code, transposed=transposed)
        absmax = integers(0, 256, size // 64, dtype=torch.uint8)
        code2 = torch.linspace(-1, 1, 256).sin()
        nested = NestedAbsmax(code2, scales(-(-size // 64 // 256)), 2**-small)
        return Nf4(codes[:, None], absmax, (experts, n, k), code, nested, transposed)
    weight = torch.randn(experts, rows, columns, generator=generator).to(torch.float8_e4m3fn)
    sizes = (experts, -(-rows // 128), -(-columns // 128))
    if format == "fp8":
        return Fp8Blocks(weight, scales(*sizes), transposed)
    middle = 127 - round(small)
    exponents = integers(middle - 3, middle + 1, *sizes, dtype=torch.uint8)
    return Fp8Blocks(weight, exponents.view(torch.float8_e8m0fnu), transposed)


def decoded(w: PackedWeight) -> torch.Tensor:
    """The weight (E, N, K) in fp64, before it is rounded to bf16; rounded to fp32 where the format
    says so."""
    experts, *sizes = w.shape
    rows, columns = reversed(sizes) if w.transposed else sizes
    decoder = {Mxfp4: _mxfp4, Nf4: _nf4, Int4: _int4, Fp8Blocks: _fp8}[type(w)]
    values = decoder(w, experts, rows, columns).view(experts, rows, columns)
    return values.mT if w.transposed else values


def _mxfp4(w, experts, rows, columns):
    """A nibble is a sign, two bits of exponent with bias 1, one of mantissa."""
    codes = w.blocks.view(experts, rows, columns // 2)
    code = torch.empty(experts, rows, columns, dtype=torch.int64)
    code[..., 0::2], code[..., 1::2] = codes % 16, codes // 16
    sign, exponent, mantissa = 1 - 2 * (code // 8), code // 2 % 4, code % 2
    normal = (2 + mantissa).double() * 2.0 ** (exponent - 2)
    magnitude = torch.where(exponent == 0, mantissa / 2, normal)
    scale = (2.0 ** (w.scales.double() - 127)).repeat_interleave(32, 2)
    return sign.double() * magnitude * scale


def _nf4(w, experts, rows, columns):
    size = experts * rows * columns
    code = torch.empty(size, dtype=torch.int64)
    code[0::2], code[1::2] = w.codes.flatten() // 16, w.codes.flatten() % 16
    absmax = w.absmax
    if w.nested is not None:
        block = torch.arange(len(absmax)) // 256
        absmax = w.nested.code2[absmax.long()] * w.nested.absmax2[block]
        absmax = absmax + w.nested.offset
    return w.code[code] * absmax.repeat_interleave(64)


def _int4(w, experts, rows, columns):
    words = w.packed.long() % 2**32
    code = torch.stack([words // 16**i % 16 for i in range(8)], 3)
    scale = w.scale.double().repeat_interleave(32, 2)
    return (code.view(experts, rows, columns) - 8) * scale


def _fp8(w, experts, rows, columns):
    scale = w.scale_inv.float()
    row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
    return w.weight.float() * scale[:, row][:, :, column]
