"""Packed weights of random bits, for the benchmarks of packed weights."""

import torch

from sonicmoe import Fp8Blocks, Int4, Mxfp4, Nf4
from sonicmoe.packed import NestedAbsmax, PackedWeight

# What bitsandbytes decodes NF4 with, whatever the code of a weight is.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
FORMATS = ("mxfp4", "nf4", "nf4 nested", "fp8", "fp8 e8m0", "int4")


def random_packed(
    format: str, shape: tuple[int, int, int], device: torch.device | str = "cuda"
) -> PackedWeight:
    """Weights (E, N, K) near 1/√K."""
    experts, n, k = shape
    size, typical = experts * n * k, k**-0.5

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, device=device, dtype=torch.uint8)

    def scales(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, device=device) + 0.5) * typical

    exponent = 127 - round(-torch.tensor(typical).log2().item())
    if format == "mxfp4":
        blocks = codes(experts, n, k // 32, 16)
        return Mxfp4(blocks, codes(experts, n, k // 32) % 4 + (exponent - 4))
    if format == "int4":
        words = codes(experts, n, k // 2).view(torch.int32)
        return Int4(words, (scales(experts, n, k // 32) / 4).bfloat16())
    if format.startswith("nf4"):
        code = torch.tensor(NF4, device=device)
        if format == "nf4":
            return Nf4(codes(size // 2), scales(size // 64), shape, code)
        nested = NestedAbsmax(
            torch.linspace(-1, 1, 256, device=device), scales(-(-size // 64 // 256)), typical
        )
        return Nf4(codes(size // 2), codes(size // 64), shape, code, nested)
    weight = torch.empty(shape, device=device, dtype=torch.float8_e4m3fn)
    for e in range(experts):  # a whole one in fp32 would take four times the memory
        weight[e] = torch.randn(n, k, device=device).to(weight.dtype)
    blocks_of = (experts, -(-n // 128), -(-k // 128))
    if format == "fp8":
        return Fp8Blocks(weight, scales(*blocks_of))
    exponents = codes(*blocks_of) % 3 + (exponent - 2)
    return Fp8Blocks(weight, exponents.view(torch.float8_e8m0fnu))
