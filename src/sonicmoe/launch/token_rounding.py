"""Launches of token rounding: three kernels forward, one backward. The host reads no result."""

from functools import cache

import torch

from ..kernels import token_rounding as kernels
from ..reference.token_rounding import most_rows
from ..shapes import ceil_div
from . import memory
from .launcher import Bound, launch, power_of_two
from .routing import with_dense_rows

_BLOCK = 32  # tokens per word of bits
_VALUES = 8192  # values of whole rows that a program holds; half of it in the backward pass
_PART = 1024  # keys of a part: 16 parts fit into 128 registers per thread of 8 warps
_EXPERTS = 128  # experts per step: their kept bits are counted in a byte
_PAIRS = 512  # pairs, and blocks of tokens, per step


def round_tokens(scores, ids, tile, subroutine, uniform):
    return _rounded(scores, ids, tile, subroutine, uniform, softmax=False, normalize=False)


def round_logits(logits, ids, normalize, tile, subroutine, uniform):
    return _rounded(logits, ids, tile, subroutine, uniform, softmax=True, normalize=normalize)


@cache
def _rounding_kernels(
    experts: int, k: int, subroutine: str, softmax: bool, normalize: bool
) -> tuple[int, Bound, Bound, Bound]:
    """Tokens per program of `keys_kernel`, and the kernels."""
    block, all_experts = _tokens_at_once(experts, _VALUES), power_of_two(experts)
    # Two programs per SM hide each other's reductions: 256 experts run at once on an H200. nr-s
    # sums scores too and needs more registers.
    columns = (
        {"PARTS": 4, "STEP": 2 * _PART, "num_warps": 16}
        if subroutine == "nr-s"
        else {"PARTS": 16, "STEP": _PART, "num_warps": 8, "maxnreg": 128}
    )
    keys = {"BLOCK_T": block, "BLOCK_E": all_experts, "BLOCK_K": power_of_two(k)}
    keys |= {"SOFTMAX": softmax, "NORMALIZE": normalize}
    return (
        block,
        Bound(kernels.keys_kernel, **keys, num_warps=8),
        Bound(kernels.select_kernel, SUBROUTINE=subroutine, BLOCK_E=all_experts, **columns),
        Bound(kernels.emit_kernel, BLOCK_E=_EXPERTS, BLOCK_P=_PAIRS, num_warps=4),
    )


def _rounded(values, ids, tile, subroutine, uniform, softmax, normalize):
    tokens, experts = values.shape
    k, device = ids.shape[1], values.device
    slots = most_rows(tokens, experts, k, tile, subroutine)

    def new(*shape, dtype=torch.int32):
        return memory.empty(shape, dtype, device)

    pair_expert, pair_token = new(slots), new(slots)
    pair_score = new(slots, dtype=torch.float32)
    token_start, rows, chosen = new(tokens + 1), new(experts), new(experts)
    outputs = (pair_expert, pair_token, pair_score, token_start, rows, chosen)
    if tokens == 0:
        pair_expert.fill_(-1)
        for t in outputs[1:]:
            t.zero_()
        return outputs

    blocks = ceil_div(tokens, _BLOCK)
    length = blocks * _BLOCK
    keys, kept, block_pairs = new(experts, length), new(blocks, experts), new(blocks)
    # Only balance-f needs the counts of all experts before `select_kernel`.
    counts = new(experts).zero_() if subroutine == "balance-f" else None
    values = with_dense_rows(values)
    block, make_keys, select, emit = _rounding_kernels(experts, k, subroutine, softmax, normalize)
    args = (values, ids, keys, counts, block_pairs, tokens, length, experts, k, values.stride(0))
    launch(make_keys, (length // block,), *args)
    args = (keys, counts, uniform, rows, chosen, kept, block_pairs, tokens, length, experts, tile)
    launch(select, (experts,), *args)
    pairs = (pair_expert, pair_token, pair_score, token_start)
    launch(emit, (blocks,), keys, kept, block_pairs, *pairs, tokens, length, experts, slots)
    return outputs


@cache
def _gradient_kernel(experts: int) -> tuple[int, Bound]:
    """Tokens per program, and the kernel."""
    block = _tokens_at_once(experts, _VALUES // 2)
    kernel = kernels.logits_gradient_kernel
    return block, Bound(kernel, BLOCK_T=block, BLOCK_E=power_of_two(experts), num_warps=8)


def round_logits_backward(dscore, logits, ids, pair_expert, token_start):
    tokens, experts = logits.shape
    dlogits = memory.empty((tokens, experts), logits.dtype, logits.device)
    if tokens:
        logits = with_dense_rows(logits)
        block, kernel = _gradient_kernel(experts)
        args = (dscore, logits, ids, pair_expert, token_start, dlogits, tokens, experts)
        k = 0 if ids is None else ids.shape[1]
        launch(kernel, (ceil_div(tokens, block),), *args, k, logits.stride(0))
    return dlogits


def _tokens_at_once(experts: int, values: int) -> int:
    return min(max(values // power_of_two(experts), 1), _BLOCK)
