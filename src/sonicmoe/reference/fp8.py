"""The experts in FP8: quantizers, and the grouped GEMMs of e4m3 operands, one expert at a time.

Functions without an underscore have the names, parameters and results of the operators in
`ops.fp8`. Every scale is a power of two, so that multiplying by it is exact:

x_scale   (T,)    rows of X; likewise do_scale of dO
w1_scale  (E,)    W1; likewise w2_scale
a_scale   (J, R)  blocks of 128 columns of a row of A, J = ⌈I/128⌉
z_scale   (J, R)  Z in e4m3, of the blocks of A: the smallest that zmax, its largest |Z|, allows
dz_scale  (R,)    rows of dZ, as dX needs it
dz_t_scale, a_t_scale  (E,)  the transposed dZ and A' of the weight gradients

dZᵀ is multiplied by x_scale before it is quantized, A'ᵀ by do_scale: so the weight gradients sum
X and dO as they were quantized.
"""

import math

import torch

from ..enums import ActivationType
from ..fp8_tensors import E4M3, Z_DTYPE, Fp8Weight
from ..permutation import Permutation
from .activation import activate, activate_backward, split_gate_up
from .grouped_gemm import _expert_rows, _gather, _slots, combine, gemm
from .quantize import (
    BLOCK,
    checked_scales,
    power_of_two_scale,
    quantize_rows,
    quantize_weight,
    to_e4m3,
)

__all__ = ["checked_scales", "quantize_rows", "quantize_weight"]  # operators too

E4M3_MAX = 448.0
MIN_SCALE = 2.0**-70
# |dA'| ≤ ‖dO‖·√H·max|W2|. The slack covers the slope of the activations, at most 1.13, and the
# rounding of dO, W2 and Z.
SLACK = 1.6


def _gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B in fp32."""
    return gemm(a.float(), b.float())


def _blocks(value: torch.Tensor) -> torch.Tensor:
    """(R, C) as (R, J, 128), padded with zeros."""
    return torch.nn.functional.pad(value, (0, -value.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def _block_amax(value: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each block of 128 columns: (J, R)."""
    return _blocks(value).abs().amax(-1).T.contiguous()


def fp8_up(x8, x_scale, w, p: Permutation, activation: ActivationType, gate_up, keep_z):
    """Z, zmax (J, R), A e4m3, a_scale (J, R); Z in bf16 if `keep_z` is "keep", in e4m3 if "fp8"."""
    z = torch.zeros(p.rows_of(x8), w.w8.shape[1], device=x8.device)
    for e, r in _expert_rows(p):
        scale = _gather(x_scale, p, r)[:, None] * w.w_scale[e]
        z[r] = _gemm(_gather(x8, p, r), w.w8[e].mT) * scale
    a = activate(z, activation, gate_up)
    a_scale = power_of_two_scale(_block_amax(a))
    a8 = to_e4m3((_blocks(a) / a_scale.T[:, :, None]).flatten(1)[:, : a.shape[1]]).contiguous()
    if keep_z not in Z_DTYPE:
        return None, None, a8, a_scale
    halves = split_gate_up(z, gate_up) if activation.is_gated else (z,)
    zmax = torch.stack([_block_amax(h) for h in halves]).amax(0)
    if keep_z == "fp8":
        return to_e4m3(z / _z_scale(zmax, activation, gate_up, a.shape[1])), zmax, a8, a_scale
    return z.to(torch.bfloat16), zmax, a8, a_scale


def _z_scale(zmax, activation: ActivationType, gate_up, inner) -> torch.Tensor:
    """The scale of each element of Z (R, N)."""
    scale = power_of_two_scale(zmax).T.repeat_interleave(BLOCK, 1)[:, :inner]
    if not activation.is_gated:
        return scale
    return scale.repeat_interleave(2, 1) if gate_up == "interleaved" else scale.repeat(1, 2)


def z_in_fp32(z, zmax, activation: ActivationType, gate_up) -> torch.Tensor:
    if z.dtype != E4M3:
        return z.float()
    inner = activation.intermediate_size(z.shape[1])
    return z.float() * _z_scale(zmax, activation, gate_up, inner)


def fp8_recomputed(dout, x, w1, w, p: Permutation, activation, gate_up):
    """Z, zmax, a_scale and x_scale once more."""
    x8, x_scale, _ = quantize_rows(x)
    w = w if w.w8 is not None else Fp8Weight(*quantize_weight(w1, False))
    z, zmax, _, a_scale = fp8_up(x8, x_scale, w, p, activation, gate_up, "keep")
    return z, zmax, a_scale, x_scale


def fp8_gemm(a8, a_scale, w, row_scores, p: Permutation):
    """Y = A Wᵀ bf16 (R, N), times the row's score if given. a_scale is (J, R), or (1, R)."""
    columns = a8.shape[1]
    per_column = a_scale.T.repeat_interleave(BLOCK if len(a_scale) > 1 else columns, 1)
    y = torch.zeros(a8.shape[0], w.w8.shape[1], device=a8.device)
    for e, r in _expert_rows(p):
        a = a8[r].float() * per_column[r, :columns]
        y[r] = _gemm(a, w.w8[e].mT) * w.w_scale[e]
    if row_scores is not None:
        y *= row_scores[:, None]
    return y.to(torch.bfloat16)


def fp8_down_and_combine(a8, a_scale, w, scores, p: Permutation, tokens, slices):
    """In one piece: slices bound the memory of the kernels and change no bit."""
    y = fp8_gemm(a8, a_scale, w, None, p)
    return combine(y, scores, p.slot_row, p.token_start, tokens)


def slope_bound(zmax: torch.Tensor, activation: ActivationType) -> torch.Tensor:
    """A bound on |∂A/∂Z| for |Z| ≤ zmax, up to the factor 1.13 that SLACK has."""
    if activation.is_gated:
        return zmax + (abs(activation.clamp.offset) if activation.clamp else 0.0)
    return 2 * zmax if activation is ActivationType.RELU_SQ else torch.ones_like(zmax)


def _row_experts(p: Permutation, rows: int) -> torch.Tensor:
    """The expert of each row; E past the last expert."""
    every = torch.arange(rows, device=p.expert_start.device)
    return torch.searchsorted(p.expert_start[1:].long(), every, right=True)


def dz_scales(
    scores, do_scale, do_norm, x_scale, zmax, a_scale, w2_scale, hidden, p, activation
):  # fmt: skip
    """factors (5, R), dz_scale (R,), dz_t_scale (E,), a_t_scale (E,).

    The factors are those of the dZ GEMM's epilogue: of the accumulator to dA', the score, and
    what dZ, dZᵀ and A'ᵀ are multiplied by before they are rounded. Rows past the last expert have
    zeros.
    """
    rows, experts = zmax.shape[1], w2_scale.shape[0]
    expert = _row_experts(p, rows)
    used, e = expert < experts, expert.clamp(max=experts - 1)
    every = slice(None)
    token = torch.arange(rows, device=zmax.device) if p.row_token is None else p.row_token.long()
    token = token.where(used, 0)
    s = torch.ones(rows, device=zmax.device)
    if scores is not None:
        slots = _slots(p, every)
        s = scores.flatten()[slots.where(used, 0) if p.row_slot is not None else slots].float()
    amax_w2 = E4M3_MAX * w2_scale[e]
    bound = SLACK * math.sqrt(hidden) * do_norm[token] * amax_w2 * s.abs()
    bound = bound * slope_bound(zmax.amax(0), activation)
    a_bound = s.abs() * do_scale[token] * (E4M3_MAX * a_scale.amax(0))
    dz_scale = power_of_two_scale(bound)
    t_bound = torch.where(used, bound * x_scale[token], 0.0)
    a_bound = torch.where(used, a_bound, 0.0)

    def of_expert(values: torch.Tensor) -> torch.Tensor:
        largest = torch.zeros(experts, device=values.device)
        return power_of_two_scale(largest.scatter_reduce_(0, e, values, "amax"))

    dz_t_scale, a_t_scale = of_expert(t_bound), of_expert(a_bound)
    factors = torch.stack([
        do_scale[token] * w2_scale[e],
        s,
        1 / dz_scale,
        x_scale[token] / dz_t_scale[e],
        s * do_scale[token] / a_t_scale[e],
    ])  # fmt: skip
    return torch.where(used, factors, 0.0), dz_scale, dz_t_scale, a_t_scale


def padded_rows(rows: int, experts: int) -> int:
    """P: columns of the transposed operands. Those of an expert start at a multiple of 128."""
    return BLOCK * (rows // BLOCK + experts)


def first_padded(expert_start: torch.Tensor) -> torch.Tensor:
    """The first column of each expert in the transposed operands: (E,)."""
    start = expert_start[:-1].long()
    return BLOCK * (start // BLOCK + torch.arange(len(start), device=start.device))


def row_of_place() -> torch.Tensor:
    """(128,): the row of a tile at each place of the transposed operands.

    Rows r and r + 8 of sixteen are neighbours: the order in which a thread of the dZ GEMM holds
    them.
    """
    place = torch.arange(BLOCK)
    return place // 16 * 16 + place % 16 // 2 + 8 * (place % 2)


def _transposed(values: torch.Tensor, p: Permutation) -> torch.Tensor:
    """(R, C) e4m3 → (C, P), by expert, in the order of `row_of_place`; zeros between experts."""
    experts = p.expert_start.shape[0] - 1
    columns = padded_rows(values.shape[0], experts)
    out = torch.zeros(columns, values.shape[1], dtype=torch.uint8, device=values.device)
    first = first_padded(p.expert_start).tolist()
    for e, r in _expert_rows(p):
        out[first[e] : first[e] + r.stop - r.start] = values[r].view(torch.uint8)
    out = out.unflatten(0, (-1, BLOCK))[:, row_of_place().to(out.device)].flatten(0, 1)
    return out.T.contiguous().view(torch.float8_e4m3fn)


def dz_gemm(do8, factors, z, zmax, w2_t, scores, p: Permutation, activation, gate_up, needs):
    """dZ e4m3 (R, N), dZᵀ (N, P), A'ᵀ (I, P) e4m3, dscores; None where not needed."""
    z = z_in_fp32(z, zmax, activation, gate_up)
    da = torch.zeros(z.shape[0], w2_t.shape[1], device=z.device)
    for e, r in _expert_rows(p):
        da[r] = _gemm(_gather(do8, p, r), w2_t[e].mT)
    f = factors[:, :, None]
    da = da * f[0]
    a = activate(z, activation, gate_up)
    dscores = None
    if needs.dscores:
        dscores = torch.zeros(scores.numel(), device=z.device)
        for _, r in _expert_rows(p):
            dscores[_slots(p, r)] = (da[r] * a[r]).sum(-1)
        dscores = dscores.view(scores.shape)
    dz = activate_backward(z, da * f[1], activation, gate_up)
    dz8 = to_e4m3(dz * f[2])
    dz_t = _transposed(to_e4m3(dz * f[3]), p) if needs.dz_t else None
    # A of Z in e4m3 may be larger than A was, whose bound is the right one; PyTorch 2.11 would make
    # it NaN.
    a_t = _transposed(to_e4m3((a * f[4]).clamp(-E4M3_MAX, E4M3_MAX)), p) if needs.dw2 else None
    return dz8 if needs.dz else None, dz_t, a_t, dscores


def weight_gradient(rows8, other_t, scale, p: Permutation):
    """(E, M, N) fp32: Σ over an expert's rows of rows8[token] (M,) times other_t (N, P)."""
    first = first_padded(p.expert_start).tolist()
    place_of_row = torch.argsort(row_of_place()).to(rows8.device)
    out = torch.zeros(len(first), rows8.shape[1], other_t.shape[0], device=rows8.device)
    other = other_t.view(torch.uint8).unflatten(1, (-1, BLOCK))[:, :, place_of_row].flatten(1)
    other = other.view(torch.float8_e4m3fn)
    for e, r in _expert_rows(p):
        columns = other[:, first[e] : first[e] + r.stop - r.start]
        out[e] = _gemm(_gather(rows8, p, r).mT, columns.mT) * scale[e]
    return out


def bf16_weight_gradient(tokens, rows, p: Permutation):
    """(E, M, N) fp32: Σ over an expert's rows of tokens[token] (M,) times rows[row] (N,)."""
    out = torch.zeros(len(p.expert_start) - 1, tokens.shape[1], rows.shape[1], device=rows.device)
    for e, r in _expert_rows(p):
        out[e] = _gemm(_gather(tokens, p, r).mT, rows[r])
    return out


def _with_transpose(w: Fp8Weight, parameter) -> Fp8Weight:
    return w if w.w8_t is not None else Fp8Weight(*quantize_weight(parameter, True))


def fp8_down_backward(dout, kept, w2, w, scores, p, activation, gate_up, needs, fp32_dw, bf16_dw):
    """dZ e4m3, dz_scale, dZᵀ, dz_t_scale, dW2 with the strides and dtype of W2, dscores."""
    z, zmax, a_scale, x_scale = kept
    w = _with_transpose(w, w2)
    do8, do_scale, do_norm = quantize_rows(dout)
    factors, dz_scale, dz_t_scale, a_t_scale = dz_scales(
        scores, do_scale, do_norm, x_scale, zmax, a_scale, w.w_scale, dout.shape[1], p, activation
    )
    dz8, dz_t, a_t, dscores = dz_gemm(
        do8, factors, z, zmax, w.w8_t, scores, p, activation, gate_up, needs
    )
    dw2 = None
    if needs.dw2:
        dw2 = torch.empty_like(w2, dtype=torch.float32 if fp32_dw else w2.dtype)
        if bf16_dw:
            a = scored_activation(z, zmax, scores, p, activation, gate_up)
            dw2.copy_(bf16_weight_gradient(dout, a, p))
        else:
            dw2.copy_(weight_gradient(do8, a_t, a_t_scale, p))
    of_dz = (dz8, dz_scale if needs.dz else None, dz_t, dz_t_scale if needs.dz_t else None)
    return *of_dz, dw2, dscores


def fp8_down_backward_into(
    main_grad, dout, kept, w2, w, scores, p, activation, gate_up, needs, bf16_dw
):
    needs, w = needs._replace(dw2=True), _with_transpose(w, w2)
    *of_dz, dw2, dscores = fp8_down_backward(
        dout, kept, main_grad, w, scores, p, activation, gate_up, needs, True, bf16_dw
    )
    main_grad.add_(dw2)
    return *of_dz, dscores


def scored_activation(z, zmax, scores, p: Permutation, activation: ActivationType, gate_up):
    """A' = score · act(Z) in bf16 (R, I)."""
    a = activate(z_in_fp32(z, zmax, activation, gate_up), activation, gate_up)
    for _, r in _expert_rows(p) if scores is not None else ():
        a[r] *= scores.flatten()[_slots(p, r)][:, None]
    return a.to(torch.bfloat16)


def fp8_up_backward(dz, x, w1, w, p: Permutation, needs, fp32_dw, bf16_dw, slices):
    """dX bf16 and dW1 with the strides and dtype of W1."""
    dx = dw1 = None
    if needs.dx:
        dx = fp8_gemm(dz.dz8, dz.dz_scale[None], _with_transpose(w, w1).mT, None, p)
        if p.is_gathered:
            dx = combine(dx, None, p.slot_row, p.token_start, x.shape[0])
    if needs.dw1:
        dw1 = torch.empty_like(w1, dtype=torch.float32 if fp32_dw else w1.dtype)
        if bf16_dw:
            rows = (dz.dz8.float() * dz.dz_scale[:, None]).to(torch.bfloat16)  # exact
            dw1.copy_(bf16_weight_gradient(x, rows, p).mT)
        else:
            dw1.copy_(weight_gradient(quantize_rows(x)[0], dz.dz_t, dz.dz_t_scale, p).mT)
    return dx, dw1


def fp8_up_backward_into(main_grad, dz, x, w1, w, p: Permutation, needs, bf16_dw, slices):
    needs, w = needs._replace(dw1=True), _with_transpose(w, w1)
    dx, dw1 = fp8_up_backward(dz, x, main_grad, w, p, needs, True, bf16_dw, slices)
    main_grad.add_(dw1)
    return dx
