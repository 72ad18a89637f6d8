"""The experts in FP8: quantizers, and the grouped GEMMs of e4m3 operands, one expert at a time.

Functions without an underscore have the names, parameters and results of the operators in
`ops.fp8`. Scales from maxima are powers of two, so that multiplying by them is exact:

x_scale   (T,)    rows of X; likewise do_scale of dO
w1_scale  (E,)    W1; likewise w2_scale
a_scale   (J, R)  blocks of 128 columns of a row of A, J = ⌈I/128⌉
z_scale   (J, R)  Z in e4m3, of the blocks of A: the smallest that zmax, its largest |Z|, allows

Scales from bounds, see `fp8_scales`, are not:

dz_scale    (R,)    rows of dZ, as dX needs it
dz_t_scale  (E, N)  columns of dZᵀ, for dW1
a_t_scale   (E, I)  A'ᵀ, for dW2: 128 columns have the same

dZᵀ is multiplied by x_scale before it is quantized, A'ᵀ by do_scale: so the weight gradients sum
X and dO as they were quantized.
"""

import torch

from ..enums import ActivationType
from ..shapes import BLOCK, padded_rows
from ..tensors import E4M3, E4M3_MAX, Dz, Lora, Permutation, Weight
from .activation import activate, activate_backward, split_gate_up
from .fp8_scales import blocks, dz_scales, row_experts, z_columns
from .grouped_gemm import combine, expert_rows, gather, gemm, row_slots
from .quantize import (
    BLOCK_FLOOR,
    checked_scales,
    power_of_two_scale,
    quantize_rows,
    quantize_weight,
    quantize_weight_into,
    to_e4m3,
)
from .weights import decoded

__all__ = [  # operators too
    "checked_scales",
    "quantize_rows",
    "quantize_weight",
    "quantize_weight_into",
]


def _gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B in fp32."""
    return gemm(a.float(), b.float())


def _block_amax(value: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each block of 128 columns: (J, R)."""
    return blocks(value).abs().amax(-1).T.contiguous()


def _joined(out: torch.Tensor, bias, lora: Lora, e: int, rows: slice) -> torch.Tensor:
    """`out`, the rows of expert e in fp32, plus U Bᵀ and the bias."""
    if lora.lora_u is not None and lora.lora_b is not None:
        out = out + _gemm(lora.lora_u[rows], lora.lora_b[e].mT)
    return out if bias is None else out + bias[e].float()


def up(
    x8, x_scale, w, b1, lora, p: Permutation, activation: ActivationType, gate_up, z_dtype
):  # fmt: skip
    """Z, zmax (J, R), zmax_columns (E, I), A e4m3, a_scale (J, R).

    Without a `z_dtype`, bf16 or e4m3, the first three are None.
    """
    w8 = decoded(w, E4M3)
    z = torch.zeros(p.rows_of(x8), w8.shape[1], device=x8.device)
    for e, r in expert_rows(p):
        scale = gather(x_scale, p, r)[:, None] * w.w_scale[e]
        z[r] = _joined(_gemm(gather(x8, p, r), w8[e].mT) * scale, b1, lora, e, r)
    a = activate(z, activation, gate_up)
    a_scale = power_of_two_scale(_block_amax(a), BLOCK_FLOOR)
    a8 = to_e4m3((blocks(a) / a_scale.T[:, :, None]).flatten(1)[:, : a.shape[1]]).contiguous()
    if z_dtype is None:
        return None, None, None, a8, a_scale
    largest = z.abs()
    if activation.is_gated:
        largest = torch.maximum(*split_gate_up(largest, gate_up))
    zmax, zmax_columns = _block_amax(largest), torch.zeros(len(w8), a.shape[1], device=z.device)
    for e, r in expert_rows(p):
        zmax_columns[e] = largest[r].amax(0)
    if z_dtype == E4M3:
        z = z / _z_scale(zmax, activation, gate_up, a.shape[1])
    return z.to(z_dtype), zmax, zmax_columns, a8, a_scale


def _z_scale(zmax, activation: ActivationType, gate_up, inner) -> torch.Tensor:
    """The scale of each element of Z (R, N)."""
    scale = power_of_two_scale(zmax, BLOCK_FLOOR).T.repeat_interleave(BLOCK, 1)[:, :inner]
    return z_columns(scale, activation, gate_up)


def z_in_fp32(z, zmax, activation: ActivationType, gate_up) -> torch.Tensor:
    if z.dtype != E4M3:
        return z.float()
    inner = activation.intermediate_size(z.shape[1])
    return z.float() * _z_scale(zmax, activation, gate_up, inner)


def _rows_in_fp32(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(R, C) e4m3 times its scales, (J, R) or (1, R)."""
    columns = q.shape[1]
    per_column = scale.T.repeat_interleave(BLOCK if len(scale) > 1 else columns, 1)
    return q.float() * per_column[:, :columns]


def down(a8, a_scale, w, b2, row_scores, lora, p: Permutation):
    """Y = A Wᵀ + b2 bf16 (R, N), times the row's score if given. a_scale is (J, R), or (1, R)."""
    a, w8 = _rows_in_fp32(a8, a_scale), decoded(w, E4M3)
    y = torch.zeros(a8.shape[0], w8.shape[1], device=a8.device)
    for e, r in expert_rows(p):
        y[r] = _joined(_gemm(a[r], w8[e].mT) * w.w_scale[e], b2, lora, e, r)
    if row_scores is not None:
        y *= row_scores[:, None]
    return y.to(torch.bfloat16)


def down_and_combine(a8, a_scale, w, b2, scores, lora, p: Permutation, tokens, slices):
    """In one piece: slices bound the memory of the kernels and change no bit."""
    y = down(a8, a_scale, w, b2, None, lora, p)
    return combine(y, scores, p.slot_row, p.token_start, tokens) if p.is_gathered else y


def first_padded(expert_start: torch.Tensor) -> torch.Tensor:
    """The first column of each expert in the transposed operands: (E,)."""
    start = expert_start[:-1].long()
    return BLOCK * (start // BLOCK + torch.arange(len(start), device=start.device))


def row_of_column() -> torch.Tensor:
    """(128,): the row of a tile in each column of the transposed operands: rows r and r + 8 of
    sixteen are neighbours. `kernels.hopper.fp8_wgrad.exchange` says why."""
    column = torch.arange(BLOCK)
    return column // 16 * 16 + column % 16 // 2 + 8 * (column % 2)


def _transposed(values: torch.Tensor, p: Permutation) -> torch.Tensor:
    """(R, C) e4m3 → (C, P), by expert, in the order of `row_of_column`; zeros between experts."""
    experts = p.expert_start.shape[0] - 1
    columns = padded_rows(values.shape[0], experts)
    out = torch.zeros(columns, values.shape[1], dtype=torch.uint8, device=values.device)
    first = first_padded(p.expert_start).tolist()
    for e, r in expert_rows(p):
        out[first[e] : first[e] + r.stop - r.start] = values[r].view(torch.uint8)
    out = out.unflatten(0, (-1, BLOCK))[:, row_of_column().to(out.device)].flatten(0, 1)
    return out.T.contiguous().view(torch.float8_e4m3fn)


def dz_gemm(
    do8, scales, z, zmax, w2_t: Weight, bias, scores, lora, p: Permutation, activation, gate_up,
    needs,
):  # fmt: skip
    """dZ e4m3 (R, N), dZᵀ (N, P), A'ᵀ (I, P) e4m3, dscores; None where not needed.

    `bias` is dO in bf16 and b2 or None, for dscores.
    """
    z, w8 = z_in_fp32(z, zmax, activation, gate_up), decoded(w2_t, E4M3)
    da = torch.zeros(z.shape[0], w8.shape[1], device=z.device)
    f = scales.row_factors[:, :, None]
    for e, r in expert_rows(p):
        da[r] = _joined(_gemm(gather(do8, p, r), w8[e].mT) * f[0, r], None, lora, e, r)
    a = activate(z, activation, gate_up)
    dscores = None
    if needs.dscores:
        dscores = torch.zeros(scores.numel(), device=z.device)
        dout, b2 = bias
        for e, r in expert_rows(p):
            dscores[row_slots(p, r)] = (da[r] * a[r]).sum(-1)
            if b2 is not None:
                dscores[row_slots(p, r)] += (gather(dout, p, r).float() * b2[e].float()).sum(-1)
        dscores = dscores.view(scores.shape)
    dz = activate_backward(z, da * f[1], activation, gate_up)
    dz8 = _saturated(dz * f[2]) if needs.dz else None
    dz_t = a_t = None
    if needs.dz_t or needs.a:
        expert = row_experts(p, len(z)).clamp(max=len(w8) - 1)
        of_dz, of_a = scales.column_factors[expert], scales.block_factors[expert]
        of_a = of_a.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
        of_dz = z_columns(of_dz, activation, gate_up)
        dz_t = _transposed(_saturated(dz * (f[3] * of_dz)), p) if needs.dz_t else None
        a_t = _transposed(_saturated(a * (f[4] * of_a)), p) if needs.a else None
    return dz8, dz_t, a_t, dscores


def _saturated(value: torch.Tensor) -> torch.Tensor:
    """In e4m3. The bounds hold for Z as up computed it. Z in e4m3 may be up to twice as large where
    it is subnormal; saturating is then closer to the truth, and PyTorch 2.11 would make it NaN."""
    return to_e4m3(value.clamp(-E4M3_MAX, E4M3_MAX))


def sum_of_products(rows8, other_t, scale, p: Permutation):
    """(E, M, N) fp32: Σ over an expert's rows of rows8[token] (M,) times other_t (N, P), times the
    scale (E, N)."""
    first = first_padded(p.expert_start).tolist()
    column_of_row = torch.argsort(row_of_column()).to(rows8.device)
    out = torch.zeros(len(first), rows8.shape[1], other_t.shape[0], device=rows8.device)
    other = other_t.view(torch.uint8).unflatten(1, (-1, BLOCK))[:, :, column_of_row].flatten(1)
    other = other.view(torch.float8_e4m3fn)
    for e, r in expert_rows(p):
        columns = other[:, first[e] : first[e] + r.stop - r.start]
        out[e] = _gemm(gather(rows8, p, r).mT, columns.mT) * scale[e]
    return out


def dz(dout, kept, w2: Weight, b2, scores, lora, lora_norm, p, activation, gate_up, needs):
    """`Dz`; dO, A'ᵀ and its scales, of which dW2 is computed; dscores. None where not needed.

    `lora_norm` (E, I) bounds what the adapter adds to the norms of the columns of W2.
    """
    if lora_norm is not None:
        w2 = w2._replace(w_norm=w2.w_norm + lora_norm)
    do8, do_scale, do_norm = quantize_rows(dout, True)
    act, columns = (activation, gate_up), needs.dz_t or needs.a
    scales = dz_scales(scores, do_scale, do_norm, kept, w2, p, *act, columns)
    dz8, dz_t, a_t, dscores = dz_gemm(
        do8, scales, kept.z, kept.z_scale, w2.mT, (dout, b2), scores, lora, p, *act, needs
    )
    dz_scale = scales.dz_scale if needs.dz else None
    dz = Dz(dz8, dz_scale, dz_t, scales.dz_t_scale if needs.dz_t else None)
    return dz, (do8, a_t, scales.a_t_scale) if needs.a else None, dscores


def dx(dz8, dz_scale, w1: Weight, lora, p: Permutation, tokens, slices):
    given = (None, None, lora, p, tokens, slices)
    return down_and_combine(dz8, dz_scale[None], w1.mT, *given)


def weight_gradient(left, right, w, p: Permutation, gathered, fp32):
    """Σ over an expert's rows of leftᵀ right, with the strides of w, in fp32 if `fp32`.

    `gathered` names the operand with rows of tokens, quantized here if they are in bf16; the other
    is transposed (N, P), with its scales (E, N).
    """
    dw = torch.empty_like(w, dtype=torch.float32 if fp32 else w.dtype)
    rows, other = (left, right) if gathered == "left" else (right, left)
    rows8 = rows if rows.dtype == E4M3 else quantize_rows(rows, False)[0]
    other_t, scale = other
    found = sum_of_products(rows8, other_t, scale, p)
    return dw.copy_(found if gathered == "left" else found.mT)


def weight_gradient_into(main_grad, left, right, p: Permutation, gathered):
    main_grad.add_(weight_gradient(left, right, main_grad, p, gathered, True))


def dequantize_rows(q, scale):
    return _rows_in_fp32(q, scale if scale.dim() == 2 else scale[None]).to(torch.bfloat16)


def scored_activation(z, zmax, scores, p: Permutation, activation: ActivationType, gate_up):
    a = activate(z_in_fp32(z, zmax, activation, gate_up), activation, gate_up)
    for _, r in expert_rows(p) if scores is not None else ():
        a[r] *= scores.flatten()[row_slots(p, r)][:, None]
    return a.to(torch.bfloat16)
