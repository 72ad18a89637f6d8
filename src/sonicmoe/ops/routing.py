"""Operators of routing: top-K, the auxiliary loss, their backward passes, and the permutation."""

import torch
from torch import Tensor

from ..shapes import max_tiles
from .registry import Mutated, operator


def _gradient_of(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fp32(t: Tensor) -> torch.dtype:
    """float64 only where the data is."""
    return torch.promote_types(t.dtype, torch.float32)


def _int32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


@operator("routing", flops=lambda dx, dlogits, weight: 2 * dlogits.shape[0] * weight.numel())
def router_gradient_into(dx: Mutated, dlogits: Tensor, weight: Tensor) -> None:
    """dX += dlogits Wr. A compiled `addmm_` would copy dX first, 64 µs at
    32768,2048,512,512,10."""


@operator("routing")
def topk(logits: Tensor, k: int, softmax_over_topk: bool, backend: str) -> tuple[Tensor, Tensor]:
    """scores (T, K) fp32 and ids (T, K) int32 of the K largest logits; ties go to the lower id."""
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=_fp32(logits)), _int32(logits, *shape)


@operator("routing")
def topk_backward(
    dscores: Tensor,
    scores: Tensor,
    ids: Tensor,
    logits: Tensor,
    softmax_over_topk: bool,
    backend: str,
) -> Tensor:
    """dlogits (T, E). With the softmax over the choice, only the shape of `logits` is used."""
    return _gradient_of(logits)


@operator("routing")
def sigmoid_topk(
    logits: Tensor,
    bias: Tensor,
    k: int,
    groups: int,
    kept: int,
    normalize: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """scores (T, K) fp32, sigmoids (T, K) fp32 and ids (T, K) int32: see `routing.Sigmoid`."""
    scores = logits.new_empty((logits.shape[0], k), dtype=_fp32(logits))
    return scores, torch.empty_like(scores), _int32(logits, *scores.shape)


@operator("routing")
def sigmoid_topk_backward(
    dscores: Tensor,
    affinity: Tensor,
    ids: Tensor,
    logits: Tensor,
    normalize: bool,
    scale: float,
    backend: str,
) -> Tensor:
    """dlogits (T, E). Only the shape of `logits` is used."""
    return _gradient_of(logits)


@operator("routing")
def balance(
    logits: Tensor, counts: Tensor | None, balance: float, z: float, backend: str
) -> tuple[Tensor, Tensor]:
    """The auxiliary loss of `routing.losses`, and its slope (E,) in the sums of the softmax."""
    fp32 = _fp32(logits)
    return logits.new_empty((), dtype=fp32), logits.new_empty(logits.shape[1], dtype=fp32)


@operator("routing")
def balance_backward(
    dloss: Tensor, slope: Tensor, logits: Tensor, z: float, backend: str
) -> Tensor:
    """dlogits (T, E)."""
    return _gradient_of(logits)


@operator("routing")
def count(ids: Tensor, num_experts: int, backend: str) -> Tensor:
    """(E,) int32: how many of `ids` name each expert; ids outside [0, E) count nowhere."""
    return _int32(ids, num_experts)


@operator("routing")
def permute(
    ids: Tensor, num_experts: int, slot_token: Tensor | None, tile_m: int, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """row_token, row_slot, slot_row, counts, expert_start and tiles of `Permutation`."""
    rows = ids.numel()
    maps = [_int32(ids, rows) for _ in range(3)]
    tiles = _int32(ids, 1 + max_tiles(rows, num_experts, tile_m), 4)
    return *maps, _int32(ids, num_experts), _int32(ids, num_experts + 1), tiles  # type: ignore


@operator("routing")
def tiles(offsets: Tensor, rows: int, tile_m: int, backend: str) -> tuple[Tensor, Tensor]:
    """expert_start and tiles of `Permutation`, from offsets (E+1,) of rows sorted by expert."""
    experts = offsets.shape[0] - 1
    return _int32(offsets, experts + 1), _int32(offsets, 1 + max_tiles(rows, experts, tile_m), 4)
