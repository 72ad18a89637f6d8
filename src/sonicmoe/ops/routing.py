"""Operators of the routing: top-K, the auxiliary loss, their backward; the permutation."""

from collections.abc import Callable
from functools import cache

import torch

from ..reference import routing as reference
from ..shapes import max_tiles
from .register import operator


@cache
def _triton():
    from ..launch import routing

    return routing


def _like_argument(place: int) -> Callable[..., torch.Tensor]:
    """A gradient of the argument at `place`."""
    return lambda *args: torch.empty_like(args[place], memory_format=torch.contiguous_format)


@operator(
    "router_gradient_into(Tensor(a!) dx, Tensor dlogits, Tensor weight) -> ()",
    fake=lambda dx, dlogits, weight: None,
    flops=lambda dx, dlogits, weight, out_shape=None: 2 * dlogits[0] * weight[0] * weight[1],
)
def router_gradient_into(dx, dlogits, weight):
    """dX += dlogits Wr. A compiled `addmm_` would copy dX first, 64 µs at
    32768,2048,512,512,10."""
    dx.addmm_(dlogits, weight)


def _topk_fake(logits, k, softmax_over_topk, backend):
    wide = torch.promote_types(logits.dtype, torch.float32)
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=wide), logits.new_empty(shape, dtype=torch.int32)


@operator(
    "topk(Tensor logits, int k, bool softmax_over_topk, str backend) -> (Tensor, Tensor)",
    fake=_topk_fake,
)
def topk(logits, k, softmax_over_topk, backend):
    """scores (T, K) fp32 and ids (T, K) int32 of the K largest logits; ties go to the lower id."""
    if backend == "torch":
        return reference.topk(logits, k, softmax_over_topk)
    return _triton().topk(logits, k, softmax_over_topk)


@operator(
    "topk_backward(Tensor dscores, Tensor scores, Tensor ids, Tensor logits, "
    "bool softmax_over_topk, str backend) -> Tensor",
    fake=_like_argument(3),
)
def topk_backward(dscores, scores, ids, logits, softmax_over_topk, backend):
    """dlogits (T, E). With the softmax over the choice, only the shape of `logits` is used."""
    if backend == "torch":
        return reference.topk_backward(dscores, scores, ids, logits, softmax_over_topk)
    return _triton().topk_backward(dscores, scores, ids, logits, softmax_over_topk)


def _sigmoid_topk_fake(logits, bias, k, groups, kept, normalize, scale, backend):
    scores, ids = _topk_fake(logits, k, False, backend)
    return scores, torch.empty_like(scores), ids


@operator(
    "sigmoid_topk(Tensor logits, Tensor bias, int k, int groups, int kept, bool normalize,"
    " float scale, str backend) -> (Tensor, Tensor, Tensor)",
    fake=_sigmoid_topk_fake,
)
def sigmoid_topk(logits, bias, k, groups, kept, normalize, scale, backend):
    """scores (T, K) fp32, sigmoids (T, K) fp32 and ids (T, K) int32: see `routing.Sigmoid`."""
    if backend == "torch":
        return reference.sigmoid_topk(logits, bias, k, groups, kept, normalize, scale)
    return _triton().sigmoid_topk(logits, bias, k, groups, kept, normalize, scale)


@operator(
    "sigmoid_topk_backward(Tensor dscores, Tensor affinity, Tensor ids, Tensor logits,"
    " bool normalize, float scale, str backend) -> Tensor",
    fake=_like_argument(3),
)
def sigmoid_topk_backward(dscores, affinity, ids, logits, normalize, scale, backend):
    """dlogits (T, E). Only the shape of `logits` is used."""
    if backend == "torch":
        return reference.sigmoid_topk_backward(dscores, affinity, ids, logits, normalize, scale)
    return _triton().sigmoid_topk_backward(dscores, affinity, ids, logits, normalize, scale)


def _balance_fake(logits, counts, balance, z, backend):
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty((), dtype=wide), logits.new_empty(logits.shape[1], dtype=wide)


@operator(
    "balance(Tensor logits, Tensor? counts, float balance, float z, str backend)"
    " -> (Tensor, Tensor)",
    fake=_balance_fake,
)
def balance(logits, counts, balance, z, backend):
    """The auxiliary loss of `routing.losses`, and its slope (E,) in the sums of the softmax."""
    if backend == "torch":
        return reference.balance(logits, counts, balance, z)
    return _triton().balance(logits, counts, balance, z)


@operator(
    "balance_backward(Tensor dloss, Tensor slope, Tensor logits, float z, str backend) -> Tensor",
    fake=_like_argument(2),
)
def balance_backward(dloss, slope, logits, z, backend):
    """dlogits (T, E)."""
    if backend == "torch":
        return reference.balance_backward(dloss, slope, logits, z)
    return _triton().balance_backward(dloss, slope, logits, z)


@operator(
    "count(Tensor ids, int num_experts, str backend) -> Tensor",
    fake=lambda ids, num_experts, backend: ids.new_empty(num_experts, dtype=torch.int32),
)
def count(ids, num_experts, backend):
    """(E,) int32: how many of `ids` name each expert; ids outside [0, E) count nowhere."""
    if backend == "torch":
        return reference.count(ids, num_experts)
    return _triton().count(ids, num_experts)


def _permute_fake(ids, num_experts, slot_token, tile_height, backend):
    def new(*shape):
        return ids.new_empty(shape, dtype=torch.int32)

    rows = ids.numel()
    tiles = new(1 + max_tiles(rows, num_experts, tile_height), 4)
    return new(rows), new(rows), new(rows), new(num_experts + 1), tiles, new(num_experts)


@operator(
    "permute(Tensor ids, int num_experts, Tensor? slot_token, int tile_height, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_permute_fake,
)
def permute(ids, num_experts, slot_token, tile_height, backend):
    """row_token, row_slot, slot_row, expert_start, tiles and counts of `Permutation`."""
    if backend == "torch":
        return reference.permute(ids, num_experts, slot_token, tile_height)
    return _triton().permute(ids, num_experts, slot_token, tile_height)


def _tiles_fake(offsets, rows, tile_height, backend):
    def new(*shape):
        return offsets.new_empty(shape, dtype=torch.int32)

    num_experts = offsets.shape[0] - 1
    return new(num_experts + 1), new(1 + max_tiles(rows, num_experts, tile_height), 4)


@operator(
    "tiles(Tensor offsets, SymInt rows, int tile_height, str backend) -> (Tensor, Tensor)",
    fake=_tiles_fake,
)
def tiles(offsets, rows, tile_height, backend):
    """expert_start and tiles of `Permutation`, from offsets (E+1,) of rows sorted by expert."""
    if backend == "torch":
        return reference.grouped_tiles(offsets, rows, tile_height)
    return _triton().tiles(offsets, rows, tile_height)
