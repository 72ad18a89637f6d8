"""The grouped GEMMs with a LoRA adapter, see `ops.lora`."""

import torch
from torch.nn import functional as F

from .activation import activate, activate_backward
from .grouped_gemm import down, gathered_gemm, in_fp32


def lora_up(x, w1, b1, u, factor, p, activation, gate_up):
    z = gathered_gemm(x, w1, b1, p) + down(u, factor, None, None, p)
    return z, activate(in_fp32(z), activation, gate_up).to(x.dtype)


def lora_gemm(a, w, bias, u, factor, p, kernel):
    return down(a, w, bias, None, p).add_(down(u, factor, None, None, p))


def lora_down_backward(dout, z, w2, b2, u, factor, scores, p, activation, gate_up):
    da = gathered_gemm(dout, w2.mT, None, p) + down(u, factor, None, None, p)
    da, z32 = in_fp32(da), in_fp32(z)
    a = activate(z32, activation, gate_up)
    dscore = (da * a).sum(-1)
    if b2 is not None:
        dscore += gathered_gemm(dout, b2[:, None], None, p)[:, 0]
    dscores = F.pad(dscore, (0, 1))[p.slot_row.long()].view_as(scores)  # -1: the zero behind
    score = scores.flatten()[p.row_slot.clamp(0, scores.numel() - 1).long()][:, None]
    dz = activate_backward(z32, score * da, activation, gate_up)
    return dz.to(z.dtype), (score * a).to(z.dtype), dscores.to(scores.dtype)


def scaled_transpose(t, scale: float, dtype: torch.dtype):
    return (in_fp32(t.t()) * scale).to(dtype).contiguous()
