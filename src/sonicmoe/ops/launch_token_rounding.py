"""Launches of token rounding: five kernels, all sizes known to the host."""

import torch

from ..kernels import permute as permute_kernels
from ..kernels import token_rounding as kernels
from ..reference.token_rounding import most_rows
from ..shapes import ceil_div
from . import memory
from .launch import launch, power_of_two

_SPANS = 64  # programs that count the choice: each expert's program adds up the counts of all
_COUNTED = 128  # slots counted at once
_COLUMN = 4096  # keys of a column read at once
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

    keys, ids = new(experts, tokens), ids.contiguous()
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    blocks = ceil_div(tokens, _TOKENS)
    launch(
        kernels.keys_kernel, (blocks, ceil_div(experts, _EXPERTS)),
        scores, ids, keys, tokens, experts, k, scores.stride(0),
        BT=_TOKENS, BE=min(_EXPERTS, power_of_two(experts)), num_warps=4,
    )  # fmt: skip

    span = ceil_div(ceil_div(tokens * k, _SPANS), _COUNTED) * _COUNTED
    spans = ceil_div(tokens * k, span)
    counts = new(spans, experts)
    launch(
        permute_kernels.count_kernel, (spans,),
        ids, counts, tokens * k, span, experts,
        BE=power_of_two(experts), CHUNK=_COUNTED, num_warps=4,
    )  # fmt: skip

    least, cut = new(experts), new(experts)
    launch(
        kernels.select_kernel, (experts,),
        keys, counts, uniform, least, cut, rows, chosen, tokens, spans, experts, tile,
        SUBROUTINE=subroutine, BE=power_of_two(experts),
        BP=min(_SPANS, max(1, 8192 // power_of_two(experts))), CHUNK=_COLUMN, num_warps=8,
    )  # fmt: skip

    per_token, per_block = new(tokens), new(blocks)
    shape = {"BT": _TOKENS, "BE": min(_EXPERTS, power_of_two(experts))}
    launch(
        kernels.tally_kernel, (blocks,),
        keys, least, cut, per_token, per_block, tokens, experts, **shape, num_warps=4,
    )  # fmt: skip
    launch(
        kernels.emit_kernel, (blocks,),
        keys, least, cut, per_token, per_block, pair_expert, pair_token, pair_score, token_start,
        tokens, experts, slots, **shape, BP=_BLOCKS, num_warps=4,
    )  # fmt: skip
    return outputs
