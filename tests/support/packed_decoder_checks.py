"""The decoders in poisoned memory against decoders written from the definitions, bit by bit."""

from functools import partial

import torch
from helpers import run_poisoned
from packed_weights import decoded, random_packed

from sonicmoe import Mxfp4, ops
from sonicmoe.launch import weights as launch
from sonicmoe.launch.quantize import quantize_weight
from sonicmoe.packed import PackedWeight
from sonicmoe.reference.fp8 import to_e4m3


def bits(t: torch.Tensor) -> torch.Tensor:
    """NaN in one encoding, zeros with their sign."""
    t = t.cpu()  # a GPU encodes NaN otherwise
    t = torch.where(t.float().isnan(), torch.nan, t.float()).to(t.dtype)
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize])


def check_decoded(w: PackedWeight, device: str, dtype=torch.bfloat16, first: int = 1) -> None:
    """The experts from `first` on."""
    stored, count = w.to(device).stored(), w.shape[0] - first
    given = (stored, first, count, dtype)
    found = run_poisoned(lambda: {"w": launch.dequantize_weight(*given)}, device)["w"]
    assert found.mT.is_contiguous() if w.transposed else found.is_contiguous()
    assert torch.equal(bits(found), bits(decoded(w)[first:].to(dtype)))


def check_quantized(w: PackedWeight, device: str, first: int = 1) -> None:
    """w8 and the transpose; scales and norms are those of the decoded weight."""
    stored, count = w.to(device).stored(), w.shape[0] - first
    _, _, scale, norm = ops.quantize_weight(stored, False, True, "triton")
    dense = decoded(w).bfloat16()
    _, _, want_scale, want_norm = quantize_weight(dense.to(device), False, True)
    assert torch.equal(scale, want_scale) and torch.equal(norm, want_norm)
    stored = stored._replace(w_scale=scale, w_norm=norm)
    want = to_e4m3(dense.float() / scale.cpu()[:, None, None])[first:]
    for packed, value in ((stored, want), (stored.mT, want.mT)):
        step = partial(_quantized, packed, first, count)
        found = run_poisoned(step, device)["w8"]
        assert found.is_contiguous()
        assert torch.equal(bits(found), bits(value))


def _quantized(*given) -> dict[str, torch.Tensor]:
    return {"w8": launch.quantize_packed(*given)}


def every_mxfp4() -> Mxfp4:
    """All codes with all exponents."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(2, 1, 16)
    return Mxfp4(blocks, scales)


def every_e4m3() -> PackedWeight:
    """All codes, NaN included, with all e8m0 scales."""
    w = random_packed("fp8 e8m0", (2, 256 * 128, 16))
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 128 * 16, 1).view(2, 256 * 128, 16)
    w.weight.copy_(codes.view(torch.float8_e4m3fn))
    exponents = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(2, 1, 1)
    w.scale_inv.copy_(exponents.view(torch.float8_e8m0fnu))
    return w


def check_tiles(device: str) -> None:
    """More tiles than a program copies; experts without rows at both ends of a part."""
    start = torch.tensor([0, 0, 40000, 40005, 40005, 110000, 110001], dtype=torch.int32)
    tiles = ops.tiles(start.to(device), 110001, 128, "torch")[1]
    entries = tiles[1:].tolist()[: int(tiles[0, 0])]
    for first, count in ((0, 1), (1, 2), (3, 3), (5, 1), (0, 6)):
        found = launch._tiles_of(tiles, first, count)
        want = [[e - first, *rest] for e, *rest in entries if first <= e < first + count]
        assert found.shape == tiles.shape
        assert found[0].tolist() == [len(want), *tiles[0, 1:].tolist()]
        assert found[1 : 1 + len(want)].tolist() == want
