"""Calls of every operator of torch.ops.sonicmoe."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from helpers import Case, Inputs, make_inputs
from packed_weights import random_packed

from sonicmoe import ActivationType, ops
from sonicmoe.layer.run import permute
from sonicmoe.ops.kinds import How, Source, kind_of
from sonicmoe.ops.registry import flattened
from sonicmoe.reference import quantize as reference
from sonicmoe.tensors import E4M3, Linear, Needs, Permutation, Weight

FLAGS = torch.zeros(2, dtype=torch.int32, pin_memory=torch.cuda.is_available())
CASE = Case("12,16,8,4,2", torch.float32, bias=True, routing="dropped")


def operator_calls(
    case: Case = CASE, b: str = "torch", device: str = "cpu"
) -> dict[str, list[tuple]]:
    """For every operator, the arguments of at least one call in each of its modes."""
    given = make_inputs(case, device)
    in_bf16 = make_inputs(replace(case, shape="12,32,16,4,2", dtype=torch.bfloat16), device)
    with torch.device(device):
        found = _router_calls(given, case.dtype, b) | _quantizer_calls(in_bf16, b)
        for precision in (None, "fp8", "fp8_bf16_dw"):
            if precision and b == "triton" and device == "cpu":
                continue  # Gluon kernels cannot be interpreted
            for name, *args in _passes(in_bf16 if precision else given, precision, b):
                found.setdefault(name, []).append(tuple(flattened(args)))
    return found


def _passes(given: Inputs, precision: str | None, b: str) -> Iterator[tuple]:
    """Names and arguments of the operators of the experts."""
    p = permute(given.ids, 4, backend=b)
    in_order = Permutation.of_sorted_rows(p.expert_start, p.tiles, p.tile_m)
    ragged = p._replace(token_start=torch.arange(0, 25, 2, dtype=torch.int32))
    (tokens, hidden), inner, dtype = given.x.shape, given.w2.shape[2], given.x.dtype

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    def how(activation="swiglu", gate_up="interleaved", z_dtype: Any = dtype, slices=1) -> How:
        act = ActivationType(activation)
        return How(precision, act, gate_up, True, z_dtype, False, True, slices, b)

    def quantized(w1: Weight, w2: Weight) -> tuple[Weight, Weight]:
        return kind_of(precision).weights(w1, w2, given.x, how(), None)

    w1, w2 = quantized(Weight(given.w1), Weight(given.w2))
    w1_t, w2_t = quantized(*(Weight(w.mT.contiguous().mT) for w in (given.w1, given.w2)))
    with torch.device("cpu"):
        packed = [random_packed("nf4", w.shape, w is given.w2) for w in (given.w1, given.w2)]
    packed1, packed2 = quantized(*(w.to(given.x.device).stored() for w in packed))
    a1, b1, a2, b2 = new(4, 8, hidden), new(4, 2 * inner, 8), new(4, 8, inner), new(4, hidden, 8)
    up, down = Linear(w1, given.b1), Linear(w2, given.b2)
    up_lora, down_lora = Linear(w1, given.b1, a1, b1), Linear(w2, given.b2, a2, b2)
    rows, scores, dout = new(24, hidden), given.scores, given.dout
    x, plain, again = given.x, how(), how("swiglu", "concatenated", slices=2)

    a = ops.up(x, up, None, p, plain)
    columns, frozen = precision == "fp8", Needs(True, False, False, False, False)
    every, back = Needs(True, True, True, False, False), (dout, a.kept, down, None, scores, p)
    yield "down_backward", *back, every, True, columns, None, False, plain
    _, dz = ops.down_backward(*back, every, True, columns, None, False, plain)
    yield "up_backward", dz, Source(x, Linear(w1), None), p, every, None, False, plain
    if precision == "fp8_bf16_dw":
        return
    yield "up", x, up, None, p, plain
    yield "up", rows, Linear(w1_t), None, in_order, how("geglu", "concatenated", None)
    yield "up", rows, Linear(w1), None, in_order, how("relu_sq", z_dtype=E4M3)
    yield "up", x, up_lora, a2, p, again
    yield "up", x, Linear(packed1, given.b1), None, p, plain
    adapted = ops.up(x, up_lora, a2, p, again)
    in_e4m3 = ops.up(x, up, None, p, how(z_dtype=E4M3))
    yield "down", a.rows, down, None, scores, p, tokens, plain
    yield "down", a.rows, Linear(w2), None, None, ragged, tokens, again
    yield "down", adapted.rows, down_lora, adapted.u2, scores, p, tokens, again
    yield "down", a.rows, Linear(w2_t), None, torch.rand(24), in_order, 24, plain
    yield "down", a.rows, Linear(packed2), None, scores, p, tokens, plain
    yield "recomputed", dout, Source(x, up, None), p, plain
    yield "recomputed", dout, Source(x, Linear(w1, given.b1, None, b1), adapted.u1), p, again
    yield "recomputed", dout, Source(x, Linear(packed1), None), p, plain

    yield "down_backward", *back, every, False, False, None, True, plain
    yield "down_backward", *back, frozen, True, False, None, False, plain
    yield "down_backward", dout, in_e4m3.kept, *back[2:], every, True, columns, None, False, plain
    of_lora = Needs(True, False, False, True, True)
    back_lora = (dout, adapted.kept, down_lora, adapted.u2, scores, p)
    yield "down_backward", *back_lora, of_lora, True, False, None, False, again
    kept = ops.up(rows, up, None, in_order, plain).kept
    without_scores = (rows, kept, Linear(w2_t), None, None, in_order)
    weight = every._replace(source=False, bias=False)
    yield "down_backward", *without_scores, weight, True, columns, None, False, plain
    of_packed = (dout, a.kept, Linear(packed2), None, scores, p)
    yield "down_backward", *of_packed, frozen, True, False, None, False, plain
    main1, main2 = (torch.zeros_like(w, dtype=torch.float32) for w in (given.w1, given.w2))
    yield "down_backward_into", *back, every, True, columns, main2, True, plain

    _, dz_alone = ops.down_backward(*back_lora, of_lora, True, False, None, False, again)
    yield "up_backward", dz, Source(x, Linear(w1_t), None), ragged, every, None, True, again
    lora = Source(x, Linear(w1, None, a1, b1), adapted.u1)
    yield "up_backward", dz_alone, lora, p, of_lora, None, False, again
    yield "up_backward", dz, Source(rows, Linear(w1), None), in_order, every, None, False, plain
    yield "up_backward", dz_alone, Source(x, Linear(packed1), None), p, frozen, None, False, plain
    of_weight = (dz, Source(x, Linear(w1), None), p, every)
    yield "up_backward_into", *of_weight, main1, True, plain


def _router_calls(given: Inputs, dtype: torch.dtype, b: str) -> dict[str, list[tuple]]:
    p = permute(given.ids, 4, backend=b)
    logits, m = torch.randn(12, 4), p.tile_m
    scores, ids = ops.topk(logits, 2, True, b)
    rows = torch.randn(24, 16, dtype=dtype)
    by_token = torch.arange(12, dtype=torch.int32).repeat_interleave(2)
    ragged = torch.searchsorted(by_token, torch.arange(13, dtype=torch.int32), out_int32=True)
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
        "combine": [
            (rows, given.scores, p.slot_row, None, 12, b),
            (rows, None, p.slot_row, ragged, 12, b),
        ],
    }


def _quantizer_calls(given: Inputs, b: str) -> dict[str, list[tuple]]:
    w1, w2 = given.w1, given.w2
    of_w1, of_w2 = (Weight(w, *reference.quantize_weight(w, True, w is w2)) for w in (w1, w2))
    w2_t = w2.mT.contiguous().mT
    with torch.device("cpu"):
        packed = random_packed("nf4 nested", (3, 16, 24), True)
    packed = packed.to(w1.device).stored()
    w1_scaled = (of_w1.w8, of_w1.w_scale)
    sample, generation = (torch.ones(size, dtype=torch.int32) for size in ((2, 4), (1,)))
    state = (sample, generation, torch.tensor([FLAGS.data_ptr()]))
    return {
        "quantize_weight": [
            (*Weight(w1), True, False, b),
            (*Weight(w1), False, False, b),
            (*Weight(w2_t.float()), True, True, b),
            (*Weight(w2_t.float()), False, True, b),
            (*packed, False, True, b),
            (*packed.mT, False, False, b),
        ],
        "quantize_weight_into": [
            (of_w1.w8, of_w1.w8_t, of_w1.w_scale, None, w1, b),
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
    }
