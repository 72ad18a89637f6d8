"""Calls of every operator of torch.ops.sonicmoe."""

from dataclasses import replace

import torch
from helpers import Case, Inputs, make_inputs

from sonicmoe import ActivationType, ops
from sonicmoe.fp8_tensors import Fp8Kept, Fp8Weight
from sonicmoe.gradients import Fp8DownGradients
from sonicmoe.layer import permute
from sonicmoe.permutation import Permutation
from sonicmoe.reference import fp8 as reference

CASE = Case("12,16,8,4,2", torch.float32, bias=True, routing="dropped")


def operator_calls(
    case: Case = CASE, b: str = "torch", device: str = "cpu"
) -> dict[str, list[tuple]]:
    """For every operator, the arguments of at least one call in each of its modes."""
    given = make_inputs(case, device)
    with torch.device(device):
        return _operator_calls(given, case.dtype, b) | _fp8_calls(case, b, device)


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


def _fp8_calls(case: Case, b: str, device: str) -> dict[str, list[tuple]]:
    given = make_inputs(
        replace(case, shape="12,16,16,4,2", dtype=torch.bfloat16, bias=False), device
    )
    x, w1, w2, dout = given.x, given.w1, given.w2, given.dout
    p = permute(given.ids, 4, backend=b)
    in_order = Permutation.of_sorted_rows(p.expert_start, p.tiles, p.tile_m)
    rows = torch.randn(24, 16, dtype=torch.bfloat16)
    x8, x_scale, _ = reference.quantize_rows(x, False)
    rows8, rows_scale, _ = reference.quantize_rows(rows, False)
    of_w1, of_w2 = (Fp8Weight(*reference.quantize_weight(w, True, w is w2)) for w in (w1, w2))
    act = (ActivationType.SWIGLU, "interleaved")
    up = (x8, x_scale, *of_w1, *p, "swiglu", "interleaved")
    up_rows = (rows8, rows_scale, *of_w1._replace(w8_t=None), *in_order)
    found = reference.fp8_up(x8, x_scale, of_w1, p, *act, "keep")
    of_z, (a8, a_scale) = found[:3], found[3:]
    every, without_scores = (Fp8DownGradients(True, True, True, scores) for scores in (True, False))
    dx_alone, dw1_alone, dw2_alone = (
        Fp8DownGradients(*(i == needed for i in range(4))) for needed in range(3)
    )
    kept, of_rows = Fp8Kept._make((*of_z, a_scale, x_scale)), (*of_z, a_scale, rows_scale)
    in_e4m3 = (*reference.fp8_up(x8, x_scale, of_w1, p, *act, "fp8")[:3], a_scale, x_scale)
    down = (dout, kept, w2, of_w2, given.scores, p, *act, every)
    dz = reference.fp8_down_backward(*down, False, False)[:4]
    grad1, grad2 = (torch.zeros_like(w, dtype=torch.float32) for w in (w1, w2))
    w1_scaled = (of_w1.w8, of_w1.w_scale)
    empty, transposed = Fp8Weight(), of_w2._replace(w8=None)
    down_back = (given.scores, *p, "swiglu", "interleaved")
    w1_t, w2_t = (w.mT.contiguous().mT for w in (w1, w2))
    sorted_rows = (*in_order, "swiglu", "concatenated")
    recomputed = (*p, "swiglu", "interleaved", b)
    ragged = torch.arange(0, 25, 2, dtype=torch.int32)
    return {
        "quantize_rows": [(x, True, b), (x, False, b), (x[:0], True, b)],
        "quantize_weight": [(w1, True, False, b), (w1, False, False, b)]
        + [(w2_t.float(), transposed, True, b) for transposed in (True, False)],
        "checked_scales": [
            (w1, *w1_scaled, w2, of_w2.w8, of_w2.w_scale, 0, b),
            (
                w1.float(),
                of_w1.w8,
                of_w1.w_scale,
                w2.mT.contiguous(),
                of_w2.w8_t,
                of_w2.w_scale,
                7,
                b,
            ),
        ],
        "fp8_up": [
            *((*up, keep_z, b) for keep_z in ("keep", "fp8", "no")),
            (*up_rows, "relu_sq", "interleaved", "fp8", b),
            (*up_rows, "geglu", "concatenated", "keep", b),
        ],
        "fp8_recomputed": [(dout, x, w1, *w, *recomputed) for w in (of_w1, empty)],
        "fp8_gemm": [
            (a8, a_scale, *of_w2, None, *p, b),
            (a8, a_scale, *of_w2, torch.rand(24), *in_order, b),
        ],
        "fp8_down_and_combine": [
            (a8, a_scale, *of_w2, given.scores, *p, 12, 2, b),
            (a8, a_scale, *of_w2, None, *p._replace(token_start=ragged), 12, 1, b),
        ],
        "fp8_down_backward": [
            (dout, *kept, w2, *transposed, *down_back, *every, False, False, b),
            (dout, *kept, w2_t, *of_w2, *down_back, *every, True, False, b),
            (dout, *kept, w2, *of_w2, *down_back, *dx_alone, False, False, b),
            (dout, *in_e4m3, w2, *of_w2, *down_back, *every, False, False, b),
            (dout, *in_e4m3, w2, *of_w2, *down_back, *every, False, True, b),
            (dout, *kept, w2, *of_w2, *down_back, *dw1_alone, False, False, b),
            (dout, *kept, w2, *empty, *down_back, *every, False, True, b),
            (rows, *of_rows, w2, *of_w2, None, *sorted_rows, *without_scores, False, False, b),
        ],
        "fp8_down_backward_into": [
            (grad2.clone(), dout, *kept, w2, *of_w2, *down_back, *every, False, b),
            (grad2.clone(), dout, *kept, w2, *empty, *down_back, *every, True, b),
            (grad2.clone(), dout, *kept, w2, *of_w2, *down_back, *dw2_alone, False, b),
        ],
        "fp8_up_backward": [
            (*dz, x, w1, *of_w1, *p, True, True, False, False, 1, b),
            (*dz, x, w1_t, *empty, *p, True, True, True, False, 2, b),
            (*dz[:2], None, None, x, w1, *of_w1, *p, True, False, False, False, 1, b),
            (None, None, *dz[2:], x, w1, *of_w1, *p, False, True, False, False, 1, b),
            (*dz[:2], None, None, x, w1, *of_w1, *p, True, True, False, True, 1, b),
        ],
        "fp8_up_backward_into": [
            (grad1.clone(), *dz, x, w1, *of_w1, *p, True, True, False, 1, b),
            (grad1.clone(), *dz, x, w1, *empty, *p, True, True, True, 2, b),
            (grad1.clone(), None, None, *dz[2:], x, w1, *of_w1, *p, False, True, False, 1, b),
        ],
    }
