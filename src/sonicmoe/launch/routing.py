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


def _with_dense_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


@cache
def _bound_topk(backward: bool, experts: int, k: int, softmax_over_topk: bool) -> tuple[int, Bound]:
    """Tokens per program, and the kernel."""
    keys = power_of_two(experts)
    # One warp per program: four warps that share a row of so many keys synchronize three times per
    # pick. That takes 70 µs for 32768 tokens with 10 of 512 experts, one warp 46 µs.
    alone = not backward and 512 <= keys <= 1024
    block = 1024 // keys if alone else min(_tokens_at_once(experts), 32)
    kernel = topk_kernels.topk_backward_kernel if backward else topk_kernels.topk_kernel
    return block, Bound(
        kernel,
        E=experts, K=k, SOFTMAX_OVER_TOPK=softmax_over_topk,
        BLOCK_T=block, BLOCK_E=keys, BLOCK_K=power_of_two(k), num_warps=1 if alone else 4,
    )  # fmt: skip


def topk(logits, k, softmax_over_topk):
    tokens, experts = logits.shape
    scores = memory.empty((tokens, k), torch.float32, logits.device)
    ids = memory.empty((tokens, k), torch.int32, logits.device)
    if tokens:
        block, kernel = _bound_topk(False, experts, k, softmax_over_topk)
        logits = _with_dense_rows(logits)
        grid = (ceil_div(tokens, block),)
        launch(kernel, grid, logits, scores, ids, tokens, logits.stride(0))
    return scores, ids


def topk_backward(dscores, scores, ids, logits, softmax_over_topk):
    tokens, experts = logits.shape
    k = ids.shape[1]
    dlogits = memory.empty((tokens, experts), logits.dtype, logits.device)
    if tokens:
        block, kernel = _bound_topk(True, experts, k, softmax_over_topk)
        if not softmax_over_topk:
            logits = _with_dense_rows(logits)
        launch(
            kernel, (ceil_div(tokens, block),),
            dscores, scores, ids, None if softmax_over_topk else logits, dlogits,
            tokens, logits.stride(0),
        )  # fmt: skip
    return dlogits


@cache
def _bound_sigmoid(
    experts: int, k: int, groups: int, kept: int, normalize: bool
) -> tuple[int, Bound, Bound]:
    """Tokens per program, and the kernels: forward, backward."""
    block = min(_tokens_at_once(experts), 16)
    tile = {
        "E": experts, "K": k, "NORMALIZE": normalize, "num_warps": 4,
        "BLOCK_T": block, "BLOCK_E": power_of_two(experts), "BLOCK_K": power_of_two(k),
    }  # fmt: skip
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
        block, kernel, _ = _bound_sigmoid(experts, k, groups, kept, normalize)
        logits = _with_dense_rows(logits)
        launch(
            kernel, (ceil_div(tokens, block),),
            logits, bias, scores, affinity, ids, scale, tokens, logits.stride(0),
        )  # fmt: skip
    return scores, affinity, ids


def sigmoid_topk_backward(dscores, affinity, ids, logits, normalize, scale):
    tokens, experts = logits.shape
    dlogits = memory.empty((tokens, experts), logits.dtype, logits.device)
    if tokens:
        block, _, kernel = _bound_sigmoid(experts, ids.shape[1], 1, 1, normalize)
        grid = (ceil_div(tokens, block),)
        launch(kernel, grid, dscores, affinity, ids, dlogits, scale, tokens)
    return dlogits


_SUMS = 512  # most programs of `softmax_sums_kernel`; one program adds up their sums


@cache
def _bound_balance(experts: int) -> tuple[int, Bound, Bound, Bound]:
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

    logits = _with_dense_rows(logits)
    block, sums, finish, _ = _bound_balance(experts)
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
        logits = _with_dense_rows(logits)
        block, *_, kernel = _bound_balance(experts)
        launch(
            kernel, (ceil_div(tokens, block),),
            dloss, slope, logits, dlogits, z, tokens, logits.stride(0),
        )  # fmt: skip
    return dlogits


def _experts_at_once(experts: int) -> tuple[int, int]:
    """BLOCK_E for all experts, and the experts per program that writes the tile table."""
    block = power_of_two(experts)
    return block, max(1, min(8, 8192 // block))


@cache
def _bound_one_chunk(experts: int, tile_height: int) -> Bound:
    block, _ = _experts_at_once(experts)
    return Bound(
        permute_kernels.one_chunk_kernel,
        BLOCK_M=tile_height,
        BLOCK_E=block,
        CHUNK=_CHUNK,
        num_warps=8,
    )


@cache
def _bound_permute(experts: int, tile_height: int) -> tuple[Bound, Bound, Bound, int]:
    """The kernels count, scan and place, and the programs of scan."""
    block, columns = _experts_at_once(experts)
    return (
        Bound(permute_kernels.count_kernel, BLOCK_E=block, CHUNK=_CHUNK, num_warps=8),
        Bound(
            permute_kernels.scan_kernel,
            BLOCK_M=tile_height, BLOCK_E=block, BLOCK_P=256, EXPERTS=columns, num_warps=8,
        ),
        Bound(permute_kernels.place_kernel, CHUNK=_CHUNK, num_warps=8),
        ceil_div(experts, columns),
    )  # fmt: skip


def count(ids, num_experts):
    totals = memory.empty((num_experts,), torch.int32, ids.device).zero_()
    slots = ids.numel()
    if slots:
        kernel = _bound_permute(num_experts, 1)[0]  # it does not use the tile size
        chunks = ceil_div(slots, _CHUNK)
        launch(kernel, (chunks,), ids, None, totals, slots, num_experts)
    return totals


def permute(ids, num_experts, slot_token, tile_height):
    slots, device = ids.numel(), ids.device

    def new(*shape):
        return memory.empty(shape, torch.int32, device)

    row_token, row_slot, slot_row = new(slots), new(slots), new(slots)
    expert_start = new(num_experts + 1)
    table = new(1 + max_tiles(slots, num_experts, tile_height), 4)
    totals = new(num_experts)
    maps = row_token, row_slot, slot_row, expert_start, table, totals
    if slots == 0:
        for t in (expert_start, table, totals):
            t.zero_()
        return maps
    per_token = ids.shape[-1] if slot_token is None else 1
    chunks = ceil_div(slots, _CHUNK)
    if chunks == 1:
        launch(
            _bound_one_chunk(num_experts, tile_height), (1,),
            ids, slot_token, row_token, row_slot, slot_row, expert_start, table, totals,
            slots, num_experts, per_token,
        )  # fmt: skip
        return maps
    counts = new(chunks, num_experts)
    count, scan, place, scans = _bound_permute(num_experts, tile_height)
    launch(count, (chunks,), ids, counts, totals.zero_(), slots, num_experts)
    launch(scan, (scans,), counts, totals, expert_start, table, chunks, num_experts)
    launch(
        place, (chunks,),
        ids, slot_token, counts, row_token, row_slot, slot_row, slots, num_experts, per_token,
    )  # fmt: skip
    return maps


def tiles(offsets, rows, tile_height):
    num_experts = offsets.shape[0] - 1

    def new(*shape):
        return memory.empty(shape, torch.int32, offsets.device)

    expert_start = new(num_experts + 1)
    table = new(1 + max_tiles(rows, num_experts, tile_height), 4)
    block, columns = _experts_at_once(num_experts)
    launch(
        permute_kernels.tiles_kernel, (ceil_div(num_experts, columns),),
        offsets, expert_start, table, rows, num_experts,
        BLOCK_M=tile_height, BLOCK_E=block, EXPERTS=columns, num_warps=4,
    )  # fmt: skip
    return expert_start, table
