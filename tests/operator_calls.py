"""Calls of every operator of torch.ops.sonicmoe."""

import torch
from helpers import Case, Inputs, make_inputs

from sonicmoe import ops
from sonicmoe.layer import permute
from sonicmoe.permutation import Permutation

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
    in_order = Permutation.of_sorted_rows(p.expert_start, p.tiles, p.tile_m)
    logits, m = torch.randn(12, 4), p.tile_m
    scores, ids = ops.topk(logits, 2, True, b)
    gather = (given.x, given.w1, given.b1, *p, "swiglu", "interleaved", "keep", b)
    z, a, _ = torch.ops.sonicmoe.up(*gather)
    rows = torch.randn(24, 16, dtype=dtype)
    down_back = (z, None, given.w2, given.b2, given.scores, *p, "swiglu", "interleaved")
    grouped_back = (z, None, given.w2, None, None, *in_order, "swiglu", "concatenated")
    up_back = (z, given.x, given.w1, *p)
    everything, some = (True, True, True, True), (True, False, False, False)
    by_token = torch.arange(12, dtype=torch.int32).repeat_interleave(2)
    ragged = torch.searchsorted(by_token, torch.arange(13, dtype=torch.int32), out_int32=True)
    transposed = given.w1.mT.contiguous().mT
    low, up_factor, down_factor = (torch.randn(n, 8, dtype=dtype) for n in (24, 4 * 16, 4 * 8))
    up_factor, down_factor = up_factor.view(4, 16, 8), down_factor.view(4, 8, 8)
    w1_grad, w2_grad = (torch.zeros_like(w, dtype=torch.float32) for w in (given.w1, given.w2))
    return {
        "lora_up": [
            (given.x, given.w1, given.b1, low, up_factor, *p, "swiglu", gate_up, b)
            for gate_up in ("interleaved", "concatenated")
        ],
        "lora_gemm": [
            (a, given.w2, given.b2, low, factor, *p, kernel, b)
            for factor, kernel in ((up_factor, "down"), (up_factor.mT.contiguous().mT, "dx"))
        ],
        "scaled_transpose": [
            (logits, 0.5, torch.bfloat16, b),
            (logits.double(), 2.0, torch.double, b),
        ],
        "lora_down_backward": [
            (
                given.dout,
                z,
                given.w2,
                bias,
                low,
                down_factor,
                given.scores,
                *p,
                "swiglu",
                gate_up,
                b,
            )
            for bias, gate_up in ((given.b2, "interleaved"), (None, "concatenated"))
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
        "tiles": [(p.expert_start, 24, m, b)],
        "up": [
            gather,
            (rows, transposed, None, *in_order, "geglu", "concatenated", "no", b),
            (rows, given.w1, None, *in_order, "relu_sq", "interleaved", "fp8", b),
        ],
        "recomputed_z": [(given.dout, *gather[:-2], b)],
        "down_and_combine": [
            (a, given.w2, given.b2, given.scores, *p, 12, 2, b),
            (a, given.w2, None, None, *p._replace(token_start=ragged), 12, 1, b),
        ],
        "down": [
            (a, given.w2, given.b2, None, *p, b),
            (a, given.w2, None, torch.rand(24), *in_order, b),
        ],
        "combine": [
            (rows, given.scores, p.slot_row, None, 12, b),
            (rows, None, p.slot_row, ragged, 12, b),
        ],
        "down_backward": [
            (given.dout, *down_back, *everything, False, b),
            (given.dout, *down_back, *some, False, b),
            (rows, *grouped_back, True, True, False, False, True, b),
        ],
        "down_backward_into": [
            (w2_grad.clone(), given.dout, *down_back, *everything, b),
            (w2_grad.clone(), given.dout, *down_back, False, True, False, False, b),
        ],
        "up_backward_into": [
            (w1_grad.clone(), *up_back, True, True, True, 1, b),
            (w1_grad.clone(), *up_back, False, True, False, 1, b),
        ],
        "up_backward": [
            (*up_back, True, True, True, False, 1, b),
            (*up_back, False, True, False, False, 1, b),
            (z, given.x, given.w1, *p._replace(token_start=ragged), True, True, True, False, 2, b),
            (z, rows, transposed, *in_order, True, True, False, True, 1, b),
        ],
    }
