"""Launches of the routing kernels."""

from functools import cache

import torch

from ..kernels import balance as balance_kernels
from ..kernels import permute as permute_kernels
from ..kernels import sigmoid as sigmoid_kernels
from ..kernels import topk as topk_kernels
from ..shapes import ceil_div, max_tiles
from . import memory
from .launcher import Bound, launch, power_of_two

_CHUNK = 1024  # slots that one program counts, and sorts in registers


def _tokens_at_once(experts: int) -> int:
    """Tokens per program of top-K: 4096 keys fit into the registers of four warps."""
    return max(1, 4096 // power_of_two(experts))


def with_dense_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


@cache
def _topk_kernel(
    backward: bool, experts: int, k: int, softmax_over_topk: bool
) -> tuple[int, Bound]:
    """Tokens per program, and the kernel."""
    keys = power_of_two(experts)
    # One warp per program: four warps that share a row of so many keys synchronize three times per
    # pick. That takes 70 µs for 32768 tokens with 10 of 512 experts, one warp 46 µs.
    alone = not backward and 512 <= keys <= 1024
    block = 1024 // keys if alone else min(_tokens_at_once(experts), 32)
    kernel = topk_kernels.topk_backward_kernel if backward else topk_kernels.topk_kernel
    sizes = {"E": experts, "K": k, "SOFTMAX_OVER_TOPK": softmax_over_topk}
    blocks = {"BLOCK_T": block, "BLOCK_E": keys, "BLOCK_K": power_of_two(k)}
    return block, Bound(kernel, **sizes, **blocks, num_warps=1 if alone else 4)


def topk(logits, k, softmax_over_topk):
    tokens, experts = logits.shape
    scores = memory.empty((tokens, k), torch.float32, logits.device)
    ids = memory.empty((tokens, k), torch.int32, logits.device)
    if tokens:
        block, kernel = _topk_kernel(False, experts, k, softmax_over_topk)
        logits = with_dense_rows(logits)
        grid = (ceil_div(tokens, block),)
        launch(kernel, grid, logits, scores, ids, tokens, logits.stride(0))
    return scores, ids


def topk_backward(dscores, scores, ids, logits, softmax_over_topk):
    tokens, experts = logits.shape
    k = ids.shape[1]
    dlogits = memory.empty((tokens, experts), logits.dtype, logits.device)
    if tokens:
        block, kernel = _topk_kernel(True, experts, k, softmax_over_topk)
        if not softmax_over_topk:
            logits = with_dense_rows(logits)
        grid, used = (ceil_div(tokens, block),), None if softmax_over_topk else logits
        launch(kernel, grid, dscores, scores, ids, used, dlogits, tokens, logits.stride(0))
    return dlogits


@cache
def _sigmoid_kernels(
    experts: int, k: int, groups: int, kept: int, normalize: bool
) -> tuple[int, Bound, Bound]:
    """Tokens per program, and the kernels: forward, backward."""
    block = min(_tokens_at_once(experts), 16)
    tile = {"E": experts, "K": k, "NORMALIZE": normalize, "BLOCK_T": block, "num_warps": 4}
    tile |= {"BLOCK_E": power_of_two(experts), "BLOCK_K": power_of_two(k)}
    grouped = {"GROUPS": groups, "KEPT": kept, "BLOCK_G": power_of_two(groups)}
    return (
        block,
        Bound(sigmoid_kernels.sigmoid_topk_kernel, **tile, **grouped),
        Bound(sigmoid_kernels.sigmoid_topk_backward_kernel, **tile),
    )


def sigmoid_topk(logits, bias, k, groups, kept, normalize, scale):
    tokens, experts = logits.shape
    scores = memory.empty((tokens, k), torch.float32, logits.device)
    affinity = memory.empty((tokens, k), torch.float32, logits.device)
    ids = memory.empty((tokens, k), torch.int32, logits.device)
    if tokens:
        block, kernel, _ = _sigmoid_kernels(experts, k, groups, kept, normalize)
        logits = with_dense_rows(logits)
        args = (logits, bias, scores, affinity, ids, scale, tokens, logits.stride(0))
        launch(kernel, (ceil_div(tokens, block),), *args)
    return scores, affinity, ids


def sigmoid_topk_backward(dscores, affinity, ids, logits, normalize, scale):
    tokens, experts = logits.shape
    dlogits = memory.empty((tokens, experts), logits.dtype, logits.device)
    if tokens:
        block, _, kernel = _sigmoid_kernels(experts, ids.shape[1], 1, 1, normalize)
        grid = (ceil_div(tokens, block),)
        launch(kernel, grid, dscores, affinity, ids, dlogits, scale, tokens)
    return dlogits


_SUMS = 512  # most programs of `softmax_sums_kernel`; one program adds up their sums


@cache
def _balance_kernels(experts: int) -> tuple[int, Bound, Bound, Bound]:
    """Tokens per step of a program, and the kernels: sums, loss, gradient."""
    block, width = min(_tokens_at_once(experts), 32), power_of_two(experts)
    tile = {"E": experts, "BLOCK_E": width}
    return (
        block,
        Bound(balance_kernels.softmax_sums_kernel, **tile, BLOCK_T=block, num_warps=4),
        Bound(balance_kernels.balance_kernel, **tile, BLOCK_P=max(1, 16384 // width), num_warps=16),
        Bound(balance_kernels.balance_backward_kernel, **tile, BLOCK_T=block, num_warps=4),
    )


def balance(logits, counts, balance, z):
    """The loss and dL/ds (E,), which `balance_backward` needs."""
    tokens, experts = logits.shape

    def new(*shape):
        return memory.empty(shape, torch.float32, logits.device)

    logits = with_dense_rows(logits)
    block, sums, finish, _ = _balance_kernels(experts)
    each = block * ceil_div(ceil_div(tokens, block), _SUMS)
    programs = ceil_div(tokens, each) if tokens else 0
    partial, squares, loss, slope = new(programs, experts), new(programs), new(), new(experts)
    if programs:
        launch(sums, (programs,), logits, partial, squares, tokens, each, logits.stride(0))
    launch(finish, (1,), partial, squares, counts, loss, slope, balance, z, programs, tokens)
    return loss, slope


def balance_backward(dloss, slope, logits, z):
    tokens, experts = logits.shape
    dlogits = memory.empty((tokens, experts), logits.dtype, logits.device)
    if tokens:
        logits = with_dense_rows(logits)
        block, *_, kernel = _balance_kernels(experts)
        args = (dloss, slope, logits, dlogits, z, tokens, logits.stride(0))
        launch(kernel, (ceil_div(tokens, block),), *args)
    return dlogits


def _experts_at_once(experts: int) -> tuple[int, int]:
    """BLOCK_E for all experts, and the experts per program that writes the tile table."""
    block = power_of_two(experts)
    return block, max(1, min(8, 8192 // block))


@cache
def _one_chunk_kernel(experts: int, tile_m: int) -> Bound:
    block, _ = _experts_at_once(experts)
    kernel = permute_kernels.one_chunk_kernel
    return Bound(kernel, BLOCK_M=tile_m, BLOCK_E=block, CHUNK=_CHUNK, num_warps=8)


@cache
def _permute_kernels(experts: int, tile_m: int) -> tuple[Bound, Bound, Bound, int]:
    """The kernels count, scan and place, and the programs of scan."""
    block, columns = _experts_at_once(experts)
    scan = {"BLOCK_M": tile_m, "BLOCK_E": block, "BLOCK_P": 256, "EXPERTS": columns}
    return (
        Bound(permute_kernels.count_kernel, BLOCK_E=block, CHUNK=_CHUNK, num_warps=8),
        Bound(permute_kernels.scan_kernel, **scan, num_warps=8),
        Bound(permute_kernels.place_kernel, CHUNK=_CHUNK, num_warps=8),
        ceil_div(experts, columns),
    )


def count(ids, num_experts):
    totals = memory.empty((num_experts,), torch.int32, ids.device).zero_()
    slots = ids.numel()
    if slots:
        kernel = _permute_kernels(num_experts, 1)[0]  # it does not use the tile size
        chunks = ceil_div(slots, _CHUNK)
        launch(kernel, (chunks,), ids, None, totals, slots, num_experts)
    return totals


def permute(ids, num_experts, slot_token, tile_m):
    slots, device = ids.numel(), ids.device

    def new(*shape):
        return memory.empty(shape, torch.int32, device)

    row_token, row_slot, slot_row = new(slots), new(slots), new(slots)
    expert_start = new(num_experts + 1)
    table = new(1 + max_tiles(slots, num_experts, tile_m), 4)
    totals = new(num_experts)
    maps = row_token, row_slot, slot_row, totals, expert_start, table
    if slots == 0:
        for t in (expert_start, table, totals):
            t.zero_()
        return maps
    per_token = ids.shape[-1] if slot_token is None else 1
    chunks = ceil_div(slots, _CHUNK)
    sizes = (slots, num_experts, per_token)
    if chunks == 1:
        kernel = _one_chunk_kernel(num_experts, tile_m)
        places = (row_token, row_slot, slot_row, expert_start, table, totals)
        launch(kernel, (1,), ids, slot_token, *places, *sizes)
        return maps
    counts = new(chunks, num_experts)
    count, scan, place, scans = _permute_kernels(num_experts, tile_m)
    launch(count, (chunks,), ids, counts, totals.zero_(), slots, num_experts)
    launch(scan, (scans,), counts, totals, expert_start, table, chunks, num_experts)
    launch(place, (chunks,), ids, slot_token, counts, row_token, row_slot, slot_row, *sizes)
    return maps


def tiles(offsets, rows, tile_m):
    num_experts = offsets.shape[0] - 1

    def new(*shape):
        return memory.empty(shape, torch.int32, offsets.device)

    expert_start = new(num_experts + 1)
    table = new(1 + max_tiles(rows, num_experts, tile_m), 4)
    block, columns = _experts_at_once(num_experts)
    grid = (ceil_div(num_experts, columns),)
    options = {"BLOCK_M": tile_m, "BLOCK_E": block, "EXPERTS": columns, "num_warps": 4}
    args = (offsets, expert_start, table, rows, num_experts)
    launch(permute_kernels.tiles_kernel, grid, *args, **options)
    return expert_start, table
