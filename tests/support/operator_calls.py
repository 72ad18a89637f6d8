"""Calls of every operator of torch.ops.sonicmoe."""

from dataclasses import replace

import torch
from helpers import Case, Inputs, make_inputs
from packed_weights import random_packed

from sonicmoe import ActivationType, ops
from sonicmoe.layer.run import permute
from sonicmoe.reference import fp8 as reference
from sonicmoe.tensors import E4M3, NO_LORA, Fp8DzResults, Fp8Kept, Fp8Weight, Permutation

FLAGS = torch.zeros(2, dtype=torch.int32, pin_memory=torch.cuda.is_available())
CASE = Case("12,16,8,4,2", torch.float32, bias=True, routing="dropped")


def operator_calls(
    case: Case = CASE, b: str = "torch", device: str = "cpu"
) -> dict[str, list[tuple]]:
    """For every operator, the arguments of at least one call in each of its modes."""
    given = make_inputs(case, device)
    with torch.device(device):
        found = _operator_calls(given, case.dtype, b) | _fp8_calls(case, b, device)
    return found | _packed_calls(found, b, device)


def _packed_calls(calls: dict[str, list[tuple]], b: str, device: str) -> dict[str, list[tuple]]:
    """The first call of each operator that also takes a packed weight, with one."""
    fields = {"up": "w1", "recomputed_z": "w1", "down": "w2", "down_and_combine": "w2"}
    fields |= {"dz": "w2", "dx": "w1", "fp8_recomputed": "w1", "fp8_dz": "w2", "fp8_dx": "w1"}
    fields |= dict.fromkeys(("fp8_up", "fp8_gemm", "fp8_down_and_combine"), "w8")
    found: dict[str, list[tuple]] = {}
    for name, field in fields.items():
        schema = getattr(torch.ops.sonicmoe, name).default._schema
        place = [argument.name for argument in schema.arguments].index(field)
        call, replaced = calls[name][0], 4 if field == "w8" else 1
        w = random_packed("nf4", call[place].shape).to(device).for_fp8().stored()
        found[f"{name}_packed"] = [(*call[:place], *w, *call[place + replaced :])]
    w = random_packed("nf4 nested", (3, 16, 24), True).to(device).stored()
    found["dequantize_weight"] = [(*w, 1, 2, torch.bfloat16, b), (*w.mT, 0, 3, torch.float32, b)]
    return found


def _operator_calls(given: Inputs, dtype: torch.dtype, b: str) -> dict[str, list[tuple]]:
    p = permute(given.ids, 4, backend=b)
    in_order = Permutation.of_sorted_rows(p.expert_start, p.tiles, p.tile_m)
    logits, m = torch.randn(12, 4), p.tile_m
    scores, ids = ops.topk(logits, 2, True, b)
    no_lora = (None, None)
    gather = (given.x, given.w1, given.b1, *no_lora, *p, "swiglu", "interleaved", dtype, b)
    z, a, _ = torch.ops.sonicmoe.up(*gather)
    rows = torch.randn(24, 16, dtype=dtype)
    of_w2 = (z, None, given.w2, given.b2, given.scores)
    interleaved, concatenated = ("swiglu", "interleaved"), ("swiglu", "concatenated")
    everything, some = (True, True, True), (True, False, False)
    by_token = torch.arange(12, dtype=torch.int32).repeat_interleave(2)
    ragged = torch.searchsorted(by_token, torch.arange(13, dtype=torch.int32), out_int32=True)
    transposed = given.w1.mT.contiguous().mT
    low, up_factor, down_factor = (torch.randn(n, 8, dtype=dtype) for n in (24, 4 * 16, 4 * 8))
    up_factor, down_factor = up_factor.view(4, 16, 8), down_factor.view(4, 8, 8)
    w1_grad, w2_grad = (torch.zeros_like(w, dtype=torch.float32) for w in (given.w1, given.w2))
    return {
        "scaled_transpose": [
            (logits, 0.5, torch.bfloat16, b),
            (logits.double(), 2.0, torch.double, b),
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
            (rows, transposed, None, *no_lora, *in_order, "geglu", "concatenated", None, b),
            (rows, given.w1, None, *no_lora, *in_order, "relu_sq", "interleaved", E4M3, b),
            (given.x, given.w1, given.b1, low, up_factor, *p, "swiglu", "concatenated", dtype, b),
        ],
        "recomputed_z": [
            (given.dout, *gather[:-2], b),
            (given.dout, given.x, given.w1, None, low, up_factor, *p, "swiglu", "interleaved", b),
        ],
        "gathered_gemm": [
            (given.x, down_factor.mT.contiguous()[:, :, :1].expand(4, 8, 16).contiguous(), *p, b),
            (rows, transposed, *in_order, b),
        ],
        "down_and_combine": [
            (a, given.w2, given.b2, given.scores, *no_lora, *p, 12, 2, b),
            (a, given.w2, None, None, *no_lora, *p._replace(token_start=ragged), 12, 1, b),
            (a, given.w2, None, given.scores, low, up_factor, *p, 12, 2, b),
        ],
        "down": [
            (a, given.w2, given.b2, None, *no_lora, *p, b),
            (a, given.w2, None, torch.rand(24), *no_lora, *in_order, b),
            (a, given.w2, given.b2, None, low, up_factor, *p, b),
        ],
        "combine": [
            (rows, given.scores, p.slot_row, None, 12, b),
            (rows, None, p.slot_row, ragged, 12, b),
        ],
        "dz": [
            (given.dout, *of_w2, *no_lora, *p, *interleaved, *everything, b),
            (given.dout, *of_w2, *no_lora, *p, *interleaved, *some, b),
            (given.dout, *of_w2, low, down_factor, *p, *interleaved, *everything, b),
            (rows, z, None, given.w2, None, None, *no_lora, *in_order, *concatenated, *some, b),
        ],
        "dx": [
            (z, given.w1, *no_lora, *p, 12, 1, b),
            (z, given.w1, *no_lora, *p._replace(token_start=ragged), 12, 2, b),
            (z, transposed, low, up_factor.mT.contiguous().mT, *in_order, 24, 1, b),
        ],
        "weight_gradient": [
            (given.dout, a, given.w2, *p, "left", False, b),
            (z, given.x, given.w1, *p, "right", True, b),
            (z, rows, transposed, *in_order, "right", False, b),
        ],
        "weight_gradient_into": [
            (w2_grad.clone(), given.dout, a, *p, "left", b),
            (w1_grad.clone(), z, rows, *in_order, "right", b),
        ],
        "bias_gradient": [
            (given.dout, given.scores, *p, True, dtype, b),
            (z, None, *p, False, dtype, b),
            (z.to(E4M3), torch.rand(24), *p, False, torch.bfloat16, b),
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
    low, norm = torch.randn(24, 8).bfloat16(), torch.rand(4, 16)
    b1, b2 = torch.randn(4, 32).bfloat16(), torch.randn(4, 16).bfloat16()
    of_b1, of_b2 = torch.randn(4, 32, 8).bfloat16(), torch.randn(4, 16, 8).bfloat16()
    alone, of_up, of_down = (None, None, None), (b1, low, of_b1), (low, of_b2)
    up = (x8, x_scale, *of_w1, *alone, *p, "swiglu", "interleaved")
    up_rows = (rows8, rows_scale, *of_w1._replace(w8_t=None), *alone, *in_order)
    found = reference.fp8_up(x8, x_scale, of_w1, None, NO_LORA, p, *act, torch.bfloat16)
    of_z, (a8, a_scale) = found[:3], found[3:]
    every, without_scores = (Fp8DzResults(True, True, True, scores) for scores in (True, False))
    dx_alone, dw1_alone, dw2_alone = (
        Fp8DzResults(*(i == needed for i in range(4))) for needed in range(3)
    )
    kept, of_rows = Fp8Kept._make((*of_z, a_scale, x_scale)), (*of_z, a_scale, rows_scale)
    in_e4m3 = reference.fp8_up(x8, x_scale, of_w1, None, NO_LORA, p, *act, E4M3)[:3]
    in_e4m3 = (*in_e4m3, a_scale, x_scale)
    down = (dout, kept, w2, of_w2, None, given.scores, NO_LORA, None, p, *act, every)
    *dz, a_t, a_t_scale, do8, _ = reference.fp8_dz(*down)
    grad1, grad2 = (torch.zeros_like(w, dtype=torch.float32) for w in (w1, w2))
    w1_scaled = (of_w1.w8, of_w1.w_scale)
    scales1, scales2 = (w._replace(w8=None, w8_t=None) for w in (of_w1, of_w2))
    transposed = of_w2._replace(w8=None)
    scored = (given.scores, *p, "swiglu", "interleaved")
    down_back = (None, given.scores, None, None, None, *p, "swiglu", "interleaved")
    adapted = (b2, given.scores, *of_down, norm, *p, "swiglu", "interleaved")
    w1_t, w2_t = (w.mT.contiguous().mT for w in (w1, w2))
    sorted_rows = (*in_order, "swiglu", "concatenated")
    recomputed = (*p, "swiglu", "interleaved", b)
    ragged = torch.arange(0, 25, 2, dtype=torch.int32)
    sample, generation = (torch.ones(size, dtype=torch.int32) for size in ((2, 4), (1,)))
    state = (sample, generation, torch.tensor([FLAGS.data_ptr()]))
    return {
        "quantize_rows": [(x, True, b), (x, False, b), (x[:0], True, b)],
        "quantize_weight": [(w1, True, False, b), (w1, False, False, b)]
        + [(w2_t.float(), transposed, True, b) for transposed in (True, False)],
        "quantize_weight_into": [
            (*of_w1._replace(w_norm=None), w1, b),
            (of_w2.w8, None, of_w2.w_scale, of_w2.w_norm, w2.float(), b),
        ],
        "checked_scales": [
            (w1, *w1_scaled, w2, of_w2.w8, of_w2.w_scale, *state, b),
            (
                w1.float(),
                of_w1.w8,
                of_w1.w_scale,
                w2.mT.contiguous(),
                of_w2.w8_t,
                of_w2.w_scale,
                *state,
                b,
            ),
        ],
        "fp8_up": [
            (x8, x_scale, *of_w1, *of_up, *p, "swiglu", "concatenated", torch.bfloat16, b),
            *((*up, z_dtype, b) for z_dtype in (torch.bfloat16, E4M3, None)),
            (*up_rows, "relu_sq", "interleaved", E4M3, b),
            (*up_rows, "geglu", "concatenated", torch.bfloat16, b),
        ],
        "fp8_recomputed": [
            (dout, x, w1, *of_w1, *alone, *recomputed),
            (dout, x, w1, *scales1, *of_up, *recomputed),
        ],
        "fp8_gemm": [
            (a8, a_scale, *of_w2, None, None, None, None, *p, b),
            (a8, a_scale, *of_w2, b2, torch.rand(24), *of_down, *in_order, b),
        ],
        "fp8_down_and_combine": [
            (a8, a_scale, *of_w2, b2, given.scores, *of_down, *p, 12, 2, b),
            (a8, a_scale, *of_w2, *alone, None, *p._replace(token_start=ragged), 12, 1, b),
        ],
        "fp8_dz": [
            (dout, *kept, w2, *transposed, *down_back, *every, b),
            (dout, *kept, w2_t, *of_w2, *down_back, *every, b),
            (dout, *kept, w2, *of_w2, *down_back, *dx_alone, b),
            (dout, *in_e4m3, w2, *of_w2, *down_back, *every, b),
            (dout, *kept, w2, *of_w2, *down_back, *dw1_alone, b),
            (dout, *kept, w2, *scales2, *down_back, *dw2_alone, b),
            (dout, *kept, w2, *of_w2, *adapted, *every, b),
            (rows, *of_rows, w2, *of_w2, *alone, None, None, *sorted_rows, *without_scores, b),
        ],
        "fp8_dx": [
            (*dz[:2], w1, *of_w1, None, None, *p, 12, 1, b),
            (*dz[:2], w1_t, *scales1, *of_down, *p, 12, 2, b),
        ],
        "fp8_weight_gradient": [
            (do8, a_t, a_t_scale, w2, *p, False, False, b),
            (do8, a_t, a_t_scale, w2_t, *p, False, True, b),
            (x, *dz[2:], w1, *p, True, False, b),
            (x, *dz[2:], w1_t, *p, True, True, b),
        ],
        "fp8_weight_gradient_into": [
            (grad2.clone(), do8, a_t, a_t_scale, *p, False, b),
            (grad1.clone(), x, *dz[2:], *p, True, b),
        ],
        "dequantize_rows": [(dz[0], *dz[:2], b), (a8, a8, a_scale, b)],
        "scored_activation": [
            (dout, *kept[:2], *scored, b),
            (dout, *in_e4m3[:2], *scored, b),
            (rows, *of_rows[:2], None, *sorted_rows, b),
        ],
    }
