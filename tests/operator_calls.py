"""Calls of every operator of torch.ops.sonicmoe."""

import torch
from helpers import Case, Inputs, make_inputs

from sonicmoe import ops
from sonicmoe.functional import permute

CASE = Case("12,16,8,4,2", torch.float32, bias=True, routing="dropped")


def operator_calls(
    case: Case = CASE, b: str = "torch", device: str = "cpu"
) -> dict[str, list[tuple]]:
    """For every operator, the arguments of at least one call in each of its modes."""
    given = make_inputs(case, device)
    with torch.device(device):
        return _operator_calls(given, case.dtype, b)


def _operator_calls(given: Inputs, dtype: torch.dtype, b: str) -> dict[str, list[tuple]]:
    p = permute(given.ids, 4, backend=b)
    logits, start, tiles, m = torch.randn(12, 4), p.expert_start, p.tiles, p.tile_height
    scores, ids = ops.topk(logits, 2, True, b)
    maps = (p.row_token, p.row_slot, p.slot_row)
    gather = (given.x, given.w1, given.b1, p.row_token, start, tiles, m, "swiglu", False)
    z, a = ops.up(*gather, True, b)
    rows = torch.randn(24, 16, dtype=dtype)
    down_back = (z, given.w2, given.b2, given.scores, *maps, start, tiles, m, "swiglu", False)
    grouped_back = (z, given.w2, None, None, None, None, None, start, tiles, m, "swiglu", True)
    up_back = (given.x, given.w1, p.row_token, p.slot_row, None, start, tiles, m)
    everything, some = (True, True, True, True), (True, False, False, False)
    by_token = torch.arange(12, dtype=torch.int32).repeat_interleave(2)
    ragged = torch.searchsorted(by_token, torch.arange(13, dtype=torch.int32), out_int32=True)
    transposed = given.w1.mT.contiguous().mT
    low, up_factor, down_factor = (torch.randn(n, 8, dtype=dtype) for n in (24, 4 * 16, 4 * 8))
    up_factor, down_factor = up_factor.view(4, 16, 8), down_factor.view(4, 8, 8)
    schedule = (start, tiles, m)
    main_grads = [torch.zeros_like(w, dtype=torch.float32) for w in (given.w1, given.w2)]
    return {
        "adapted_up": [
            (given.x, given.w1, given.b1, low, up_factor, p.row_token, *schedule, "swiglu", c, b)
            for c in (False, True)
        ],
        "adapted_product": [
            (a, given.w2, given.b2, low, factor, *schedule, kernel, b)
            for factor, kernel in ((up_factor, "down"), (up_factor.mT.contiguous().mT, "dx"))
        ],
        "transposed": [(logits, 0.5, torch.bfloat16, b), (logits.double(), 2.0, torch.double, b)],
        "adapted_down_backward": [
            (given.dout, z, given.w2, bias, low, down_factor, given.scores, *maps, *schedule,
             "swiglu", False, b)
            for bias in (given.b2, None)
        ],
        "topk": [(logits, 2, True, b), (logits.bfloat16(), 3, False, b)],
        "topk_backward": [(scores, scores, ids, logits, over, b) for over in (True, False)],
        "sigmoid_topk": [
            (logits.bfloat16(), torch.rand(4), 2, 1, 1, True, 2.5, b),
            (logits.double(), torch.rand(4), 1, 2, 1, False, 1.0, b),
        ],
        "sigmoid_topk_backward": [(scores, scores, ids, logits, n, 2.5, b) for n in (True, False)],
        "count": [(given.ids, 4, b), (given.ids[:0], 4, b)],
        "balance": [
            (logits.bfloat16(), p.counts, 0.5, 0.1, b),
            (logits.double(), None, 0.0, 1.0, b),
        ],
        "balance_backward": [(torch.rand(()), torch.rand(4), logits.bfloat16(), 0.1, b)],
        "permute": [
            (given.ids, 4, None, m, b),
            (given.ids.flatten(), 4, by_token, m, b),
            (given.ids[:0], 4, None, m, b),
            (given.ids.repeat(100, 1), 4, None, m, b),  # more than one span
        ],
        "router_gradient_into": [
            (rows[:12].clone(), logits.to(dtype), torch.rand(4, rows.shape[1], dtype=dtype))
        ],
        "round_tokens": [
            (logits.softmax(-1), ids, 3, subroutine, torch.rand(4), b)
            for subroutine in ("nr-f", "nr-s")
        ],
        "round_logits": [
            (logits.to(dtype), ids, normalize, 3, "up", None, b)
            for normalize, dtype in ((False, torch.bfloat16), (True, torch.float64))
        ],
        "round_logits_backward": [
            (torch.rand(24), logits.bfloat16(), chosen, ids.flatten(), ragged, b)
            for chosen in (None, ids)
        ],
        "tiles": [(start, 24, m, b)],
        "up": [
            (*gather, True, b),
            (rows, transposed, None, None, start, tiles, m, "geglu", True, False, b),
            (rows, given.w1, None, None, start, tiles, m, "relu_sq", False, True, b),
        ],
        "down": [
            (a, given.w2, given.b2, None, start, tiles, m, False, b),
            (a, given.w2, None, torch.rand(24), start, tiles, m, True, b),
        ],
        "aggregate": [
            (rows, given.scores, p.slot_row, None, 12, b),
            (rows, None, p.slot_row, ragged, 12, b),
        ],
        "down_backward": [
            (given.dout, *down_back, *everything, False, b),
            (given.dout, *down_back, *some, False, b),
            (rows, *grouped_back, True, True, False, False, True, b),
        ],
        "down_backward_into": [
            (main_grads[1].clone(), given.dout, *down_back, True, True, True, b),
            (main_grads[1].clone(), given.dout, *down_back, False, False, False, b),
        ],
        "up_backward_into": [
            (main_grads[0].clone(), z, *up_back, True, True, b),
            (main_grads[0].clone(), z, *up_back, False, False, b),
        ],
        "up_backward": [
            (z, *up_back, True, True, True, False, b),
            (z, *up_back, False, True, False, False, b),
            (z, *up_back[:4], ragged, *up_back[5:], True, True, True, False, b),
            (z, rows, transposed, None, None, None, start, tiles, m, True, True, False, True, b),
        ],
    }  # fmt: skip
