"""The grouped GEMMs and combine, forward and backward, one expert at a time.

Functions have the names, parameters and results of the operators in `ops.grouped_gemm`.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

from ..enums import ActivationType
from ..tensors import E4M3, NO_LORA, Permutation, Weight
from .activation import activate, activate_backward
from .quantize import dequantize_blocks, quantize_blocks
from .weights import decoded


def expert_rows(p: Permutation) -> Iterator[tuple[int, slice]]:
    start = p.expert_start.tolist()
    for e in range(len(start) - 1):
        if start[e] < start[e + 1]:
            yield e, slice(start[e], start[e + 1])


def in_fp32(t: torch.Tensor) -> torch.Tensor:
    """The dtype elementwise arithmetic runs in: fp32, or fp64 where the data is."""
    if t.dtype == E4M3:
        return t.float()
    return t.to(torch.promote_types(t.dtype, torch.float32))


def gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A B + bias, also under autocast.

    On a CPU in fp32: without bf16 instructions PyTorch's own GEMM of bf16 takes 200 times as long.
    """
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return gemm(a, b, bias)
    dtype = torch.float32 if a.device.type == "cpu" and a.dtype.itemsize == 2 else a.dtype
    out = linear(a.to(dtype), b.mT.to(dtype), None if bias is None else bias.to(dtype))
    return out.to(a.dtype)


def gather(x: torch.Tensor, p: Permutation, rows: slice) -> torch.Tensor:
    return x[rows] if p.row_token is None else x[p.row_token[rows].long()]


def row_slots(p: Permutation, rows: slice) -> torch.Tensor | slice:
    """Where the scores of these rows are."""
    return rows if p.row_slot is None else p.row_slot[rows].long()


def up(
    x, w1, b1, lora, p: Permutation, activation: ActivationType, gate_up: str,
    z_dtype: torch.dtype | None,
):  # fmt: skip
    z, z_scale = _rows_gemm(x, w1, b1, lora, p), None
    a = activate(in_fp32(z), activation, gate_up).to(x.dtype)
    if z_dtype == E4M3:
        z, z_scale = quantize_blocks(z, _concatenated(activation, gate_up))
    return (None if z_dtype is None else z), a, z_scale


def _concatenated(activation: ActivationType, gate_up: str) -> bool:
    return activation.is_gated and gate_up == "concatenated"


def gathered_gemm(x, w, p: Permutation):
    return _rows_gemm(x, Weight(w), None, NO_LORA, p)


def _rows_gemm(x, w: Weight, bias, lora, p: Permutation):
    """X Wᵀ + U Bᵀ + bias of every row: (R, N). Rows past the last expert are zero."""
    out, dense = x.new_zeros(p.rows_of(x), w.shape[1]), decoded(w, x.dtype)
    for e, r in expert_rows(p):
        out[r] = _add_lora(gemm(gather(x, p, r), dense[e].mT, _of(bias, e)), lora, e, r)
    return out


def _add_lora(out, lora, e: int, rows: slice):
    if lora.lora_u is None:
        return out
    return out + gemm(lora.lora_u[rows], lora.lora_b[e].mT)


def _of(bias, e: int):
    return None if bias is None else bias[e]


def down(a, w2, b2, row_scores, lora, p: Permutation):
    return _sorted_gemm(a, w2, b2, row_scores, lora, p)


def _sorted_gemm(a, w2, b2, row_scores, lora, p: Permutation):
    y, w2 = a.new_zeros(a.shape[0], w2.shape[1]), decoded(w2, a.dtype)
    for e, r in expert_rows(p):
        out = _add_lora(gemm(a[r], w2[e].mT, _of(b2, e)), lora, e, r)
        y[r] = out if row_scores is None else (in_fp32(out) * row_scores[r, None]).to(a.dtype)
    return y


def combine(y, scores, slot_row, token_start, tokens: int):
    slots = slot_row.numel()
    here = slot_row >= 0
    if token_start is None:
        token = torch.arange(tokens, device=y.device).repeat_interleave(slots // max(tokens, 1))
    else:
        token = torch.searchsorted(
            token_start, torch.arange(slots, device=y.device, dtype=token_start.dtype), right=True
        ).sub_(1)
    picked = in_fp32(y[slot_row[here].long()])
    if scores is not None:
        picked = picked * scores.flatten()[here][:, None]
    out = picked.new_zeros(tokens, y.shape[1])
    return out.index_add_(0, token[here], picked).to(y.dtype)


def down_and_combine(a, w2, b2, scores, lora, p: Permutation, tokens: int, slices: int):
    """In one piece: slices bound the memory of the kernels and change no bit."""
    y = _sorted_gemm(a, w2, b2, None, lora, p)
    return combine(y, scores, p.slot_row, p.token_start, tokens) if p.is_gathered else y


def dz(
    dout, z, z_scale, w2, b2, scores, lora, p: Permutation, activation: ActivationType, gate_up,
    needs,
):  # fmt: skip
    """Without Y: dS = ⟨dA', A⟩ over I."""
    if z_scale is not None:
        z = dequantize_blocks(z, z_scale, _concatenated(activation, gate_up))
    out, w2 = torch.zeros_like(z, dtype=dout.dtype), decoded(w2, dout.dtype)
    scored = dout.new_zeros(z.shape[0], w2.shape[2])
    dscores = None if scores is None else torch.zeros_like(scores).flatten()
    for e, r in expert_rows(p):
        do, z_r = gather(dout, p, r), in_fp32(z[r])
        a, da = activate(z_r, activation, gate_up), in_fp32(_add_lora(gemm(do, w2[e]), lora, e, r))
        if scores is not None and dscores is not None:
            ds = (da * a).sum(-1)
            if b2 is not None:
                ds += (in_fp32(do) * b2[e]).sum(-1)
            dscores[row_slots(p, r)] = ds.to(dscores.dtype)
            s = scores.flatten()[row_slots(p, r)][:, None]
            da, a = da * s, a * s
        out[r] = activate_backward(z_r, da, activation, gate_up).to(out.dtype)
        scored[r] = a.to(dout.dtype)
    dscores = None if scores is None or dscores is None else dscores.view_as(scores)
    return (
        out if needs.dz else None,
        scored if needs.a else None,
        dscores if needs.dscores else None,
    )


def dx(dz, w1, lora, p: Permutation, tokens: int, slices: int):
    return down_and_combine(dz, w1.mT, None, None, lora, p, tokens, slices)


def weight_gradient(left, right, w, p: Permutation, gathered: str, fp32: bool):
    dw = torch.zeros_like(w, dtype=torch.float32 if fp32 else None)
    for e, r in expert_rows(p):
        of_left = gather(left, p, r) if gathered == "left" else left[r]
        of_right = gather(right, p, r) if gathered == "right" else right[r]
        dtype = dw.dtype if fp32 else left.dtype
        dw[e] = gemm(of_left.to(dtype).mT, of_right.to(dtype))
    return dw


def weight_gradient_into(main_grad, left, right, p: Permutation, gathered: str):
    main_grad.add_(weight_gradient(left, right, main_grad, p, gathered, True))


def bias_gradient(rows, scores, p: Permutation, gathered: bool, dtype: torch.dtype):
    out = rows.new_zeros(p.expert_start.shape[0] - 1, rows.shape[1], dtype=dtype)
    for e, r in expert_rows(p):
        values = in_fp32(gather(rows, p, r) if gathered else rows[r])
        if scores is not None:
            values = values * scores.flatten()[row_slots(p, r) if gathered else r][:, None]
        out[e] = values.sum(0).to(dtype)
    return out


def scaled_transpose(t, scale: float, dtype: torch.dtype):
    return (in_fp32(t.t()) * scale).to(dtype).contiguous()
