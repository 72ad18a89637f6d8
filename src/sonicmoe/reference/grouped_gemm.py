"""The grouped GEMMs and combine, forward and backward, one expert at a time.

Functions have the names, parameters and results of the operators in `ops.grouped_gemm`.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

from ..enums import ActivationType
from ..permutation import Permutation
from .activation import activate, activate_backward
from .quantize import dequantize_blocks, quantize_blocks


def _expert_rows(p: Permutation) -> Iterator[tuple[int, slice]]:
    start = p.expert_start.tolist()
    for e in range(len(start) - 1):
        if start[e] < start[e + 1]:
            yield e, slice(start[e], start[e + 1])


def in_fp32(t: torch.Tensor) -> torch.Tensor:
    """The dtype elementwise arithmetic runs in: fp32, or fp64 where the data is."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A B + bias, also under autocast.

    On a CPU in fp32: without bf16 instructions PyTorch's own GEMM of bf16 takes 200 times as long.
    """
    dtype = torch.float32 if a.device.type == "cpu" and a.dtype.itemsize == 2 else a.dtype
    with torch.autocast(a.device.type, enabled=False):
        out = linear(a.to(dtype), b.mT.to(dtype), None if bias is None else bias.to(dtype))
    return out.to(a.dtype)


def _gather(x: torch.Tensor, p: Permutation, rows: slice) -> torch.Tensor:
    return x[rows] if p.row_token is None else x[p.row_token[rows].long()]


def _slots(p: Permutation, rows: slice) -> torch.Tensor | slice:
    """Where the scores of these rows are."""
    return rows if p.row_slot is None else p.row_slot[rows].long()


def up(x, w1, b1, p: Permutation, activation: ActivationType, gate_up: str, keep_z: str):
    z, z_scale = gathered_gemm(x, w1, b1, p), None
    a = activate(in_fp32(z), activation, gate_up).to(x.dtype)
    if keep_z == "fp8":
        z, z_scale = quantize_blocks(z, _concatenated(activation, gate_up))
    return (z if keep_z in ("keep", "fp8") else None), a, z_scale


def _concatenated(activation: ActivationType, gate_up: str) -> bool:
    return activation.is_gated and gate_up == "concatenated"


def recomputed_z(dout, x, w1, b1, p: Permutation, activation, gate_up):
    return gathered_gemm(x, w1, b1, p)


def gathered_gemm(x, w, bias, p: Permutation):
    """X Wᵀ + bias of every row: (R, N). Rows past the last expert are zero."""
    out = x.new_zeros(p.rows_of(x), w.shape[1])
    for e, r in _expert_rows(p):
        out[r] = gemm(_gather(x, p, r), w[e].mT, None if bias is None else bias[e])
    return out


def down(a, w2, b2, row_scores, p: Permutation):
    y = a.new_zeros(a.shape[0], w2.shape[1])
    for e, r in _expert_rows(p):
        out = gemm(a[r], w2[e].mT, None if b2 is None else b2[e])
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


def down_and_combine(a, w2, b2, scores, p: Permutation, tokens: int, slices: int):
    """In one piece: slices bound the memory of the kernels and change no bit."""
    return combine(down(a, w2, b2, None, p), scores, p.slot_row, p.token_start, tokens)


def down_backward(
    dout, z, z_scale, w2, b2, scores, p: Permutation, activation: ActivationType, gate_up, needs,
    fp32_dw,
):  # fmt: skip
    """Without Y: dS = ⟨dA', A⟩ over I."""
    if z_scale is not None:
        z = dequantize_blocks(z, z_scale, _concatenated(activation, gate_up))
    dz, dw2 = torch.zeros_like(z, dtype=dout.dtype), torch.zeros_like(w2)
    db2 = None if b2 is None else torch.zeros_like(b2)
    dscores = None if scores is None else torch.zeros_like(scores).flatten()
    for e, r in _expert_rows(p):
        do, z_r = _gather(dout, p, r), in_fp32(z[r])
        a, da = activate(z_r, activation, gate_up), in_fp32(gemm(do, w2[e]))
        s = None
        if scores is not None and dscores is not None:
            ds = (da * a).sum(-1)
            if b2 is not None:
                ds += (in_fp32(do) * b2[e]).sum(-1)
            dscores[_slots(p, r)] = ds.to(dscores.dtype)
            s = scores.flatten()[_slots(p, r)][:, None]
            da, a = da * s, a * s
        dz[r] = activate_backward(z_r, da, activation, gate_up).to(dz.dtype)
        dw2[e] = gemm(do.mT, a.to(dout.dtype))
        if db2 is not None:
            db2[e] = (in_fp32(do) if s is None else in_fp32(do) * s).sum(0).to(db2.dtype)
    dscores = None if scores is None or dscores is None else dscores.view_as(scores)
    return _needed((dz, dw2.float() if fp32_dw else dw2, db2, dscores), needs)


def down_backward_into(main_grad, dout, z, z_scale, w2, b2, scores, p, activation, gate_up, needs):
    needs = needs._replace(dw2=True)
    dz, dw2, db2, dscores = down_backward(
        dout, z, z_scale, w2, b2, scores, p, activation, gate_up, needs, True
    )
    main_grad.add_(dw2)
    return dz, db2, dscores


def up_backward(dz, x, w1, p: Permutation, needs, fp32_dw, slices):
    dx, dw1 = dz.new_zeros(dz.shape[0], x.shape[1]), torch.zeros_like(w1)
    db1 = w1.new_zeros(w1.shape[0], w1.shape[1])
    for e, r in _expert_rows(p):
        dx[r] = gemm(dz[r], w1[e])
        dw1[e] = gemm(dz[r].mT, _gather(x, p, r))
        db1[e] = in_fp32(dz[r]).sum(0).to(db1.dtype)
    if p.is_gathered and needs.dx:
        dx = combine(dx, None, p.slot_row, p.token_start, x.shape[0])
    return _needed((dx, dw1.float() if fp32_dw else dw1, db1), needs)


def up_backward_into(main_grad, dz, x, w1, p, needs, slices):
    dx, dw1, db1 = up_backward(dz, x, w1, p, needs._replace(dw1=True), True, slices)
    main_grad.add_(dw1)
    return dx, db1


def _needed(found: tuple, needs: tuple) -> tuple:
    return tuple([t if need else None for t, need in zip(found, needs, strict=True)])
