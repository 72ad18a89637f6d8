"""Launches of token rounding: four kernels, every size known to the host."""

import torch

from ..kernels import token_rounding as kernels
from ..reference.token_rounding import most_rows
from ..shapes import ceil_div
from . import memory
from .launch import launch, power_of_two

_COLUMN = 16384  # keys of an expert that stay in the registers of 32 warps
_TOKENS, _EXPERTS = 32, 128  # a tile of the keys; rows of 128 bytes in both directions
_BLOCKS = 1024  # blocks of tokens added up at once


def round_tokens(scores, ids, tile, subroutine, uniform):
    tokens, experts = scores.shape
    k, device = ids.shape[1], scores.device
    slots = most_rows(tokens, experts, k, tile, subroutine)

    def new(*shape, dtype=torch.int32):
        return memory.empty(shape, dtype, device)

    pair_expert, pair_token, pair_score = new(slots), new(slots), new(slots, dtype=torch.float32)
    token_start, rows, chosen = new(tokens + 1), new(experts), new(experts)
    outputs = (pair_expert, pair_token, pair_score, token_start, rows, chosen)
    if tokens == 0:
        pair_expert.fill_(-1)
        for t in outputs[1:]:
            t.zero_()
        return outputs

    length = 16 * ceil_div(tokens, 16)
    keys, ids = new(experts, length), ids.contiguous()
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    least, cut = new(experts), new(experts)
    blocks = ceil_div(tokens, _TOKENS)
    per_token, per_block = new(tokens), new(blocks)
    columns = min(_EXPERTS, power_of_two(experts))
    launch(
        kernels.keys_kernel, (blocks, ceil_div(experts, columns)),
        scores, ids, keys, chosen.zero_(), tokens, length, experts, k, scores.stride(0),
        BT=_TOKENS, BE=columns, num_warps=8,
    )  # fmt: skip
    launch(
        kernels.select_kernel, (experts,),
        keys, chosen, uniform, rows, least, cut, tokens, length, experts, tile,
        SUBROUTINE=subroutine, BE=power_of_two(experts),
        CHUNK=_COLUMN // 2 if subroutine == "nr-s" else _COLUMN,  # its sums take registers too
        num_warps=32,
    )  # fmt: skip
    launch(
        kernels.tally_kernel, (blocks,),
        keys, least, cut, per_token, per_block, tokens, length, experts,
        BT=_TOKENS, BE=columns, num_warps=4,
    )  # fmt: skip
    launch(
        kernels.emit_kernel, (blocks,),
        keys, least, cut, per_token, per_block, pair_expert, pair_token, pair_score, token_start,
        tokens, length, experts, slots,
        BT=_TOKENS, BE=columns, BP=_BLOCKS, num_warps=8,
    )  # fmt: skip
    return outputs
