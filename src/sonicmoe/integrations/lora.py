"""LoRA on experts, in PEFT's layout: W + scale·B·A is never formed, and W gets no gradient.

Both halves of an adapter are grouped products of their own: Z = X W1ᵀ + (X A1ᵀ) B1ᵀ, row by row
with the factors of the row's expert, and the same again around W2.
"""

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .. import ops
from ..enums import ActivationType
from ..errors import bad_argument
from ..functional import _autocast, permute
from ..permutation import Permutation
from ..reference.activation import activate, activate_backward
from ..shapes import ceil_div
from ..validation import check_choice, check_shape, check_weights, resolve_backend


class LowRank(NamedTuple):
    """One adapter as PEFT stores it: `lora_A.weight` (r·E, in), rows by expert, then by rank;
    `lora_B.weight` (out, r·E), columns by rank, then by expert; and its scaling."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


def lora_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    lora1: LowRank,
    lora2: LowRank,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    activation: ActivationType = ActivationType.SWIGLU,
    gate_up: str = "interleaved",
    backend: str | None = None,
) -> torch.Tensor:
    """`sonicmoe.experts` with adapters on frozen weights; gradients for x, scores and the factors.

    Kept for the backward pass: x, Z, and X A1ᵀ and A A2ᵀ, which are r numbers a row each.
    """
    x, w1, w2, b1, b2 = _autocast(x, w1, w2, b1, b2)
    check_weights(x, w1, w2, b1, b2, activation, gate_up)
    check_choice(x, ids, scores)
    for name, t in (("w1", w1), ("w2", w2), ("b1", b1), ("b2", b2)):
        if t is not None and t.requires_grad:
            raise bad_argument(
                name, "a frozen tensor", "one that requires a gradient", "requires_grad_(False)."
            )
    backend = resolve_backend(backend, x)
    p = permute(ids, w1.shape[0], dtype=x.dtype, backend=backend)
    factors = *_by_expert("lora1", lora1, w1), *_by_expert("lora2", lora2, w2)
    scores = scores.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    concatenated = gate_up == "concatenated"
    return _LowRankLayer.apply(
        x.contiguous(), scores, *factors, w1, w2, b1, b2, p, activation, concatenated, backend
    )


def _by_expert(name: str, lora: LowRank, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A (E, r, in) and scale·B (E, out, r), the rank filled up with zeros to a multiple of 8."""
    experts, out_size, in_size = w.shape
    rank = lora.a.shape[0] // experts
    check_shape(f"a of {name}", lora.a, (rank * experts, in_size), "(r·E, in)")
    check_shape(f"b of {name}", lora.b, (out_size, rank * experts), "(out, r·E)")
    more = ceil_div(rank, 8) * 8 - rank
    a = F.pad(lora.a.view(experts, rank, in_size), (0, 0, 0, more))
    b = F.pad(lora.b.view(out_size, rank, experts).permute(2, 0, 1), (0, more))
    return a.to(w.dtype).contiguous(), (lora.scale * b).to(w.dtype).contiguous()


class _Products:
    """The grouped products of one permutation, by what they do to rows."""

    def __init__(self, p: Permutation, backend: str) -> None:
        self.p, self.backend = p, backend
        self.schedule = (p.expert_start, p.tiles, p.tile_height)

    def gathered(self, x, w, bias=None):
        """(T, in) → (R, out), rows fetched by the product. What it does beside is left aside."""
        return ops.up(
            x, w, bias, self.p.row_token, *self.schedule, "relu", False, True, self.backend
        )[0]

    def rows(self, rows, w, bias=None):
        """(R, in) → (R, out)."""
        return ops.down(rows, w, bias, None, *self.schedule, False, self.backend)

    def back_to_tokens(self, rows, x, w, need_dw):
        """dX (T, in), summed over a token's rows, and dW = rowsᵀ X, rows of X fetched."""
        p = self.p
        dx, dw, _ = ops.up_backward(
            rows, x, w, p.row_token, p.slot_row, p.token_start, *self.schedule,
            True, need_dw, False, self.backend,
        )  # fmt: skip
        return dx, dw

    def outer(self, rows, other, w, gather=False):
        """(E, out, in) = Σ over an expert's rows of rowsᵀ other, shaped and stored like w."""
        p = self.p
        maps = (p.row_token, p.slot_row, p.token_start) if gather else (None, None, None)
        return ops.up_backward(
            rows, other, w, *maps, *self.schedule, False, True, False, self.backend
        )[1]


def _wide(t):
    return t.to(torch.promote_types(t.dtype, torch.float32))


class _LowRankLayer(torch.autograd.Function):
    """Kept: X, Z 2·R·N, X A1ᵀ and A A2ᵀ 2·R·r each, scores, maps. Not A, not Y, no weight."""

    @staticmethod
    def forward(
        ctx, x, scores, a1, b1, a2, b2, w1, w2, bias1, bias2, p, activation, concat, backend
    ):  # fmt: skip
        do = _Products(p, backend)
        u1 = do.gathered(x, a1)
        z = do.gathered(x, w1, bias1).add_(do.rows(u1, b1))
        a = activate(_wide(z), activation, concat).to(x.dtype)
        u2 = do.rows(a, a2)
        y = do.rows(a, w2, bias2).add_(do.rows(u2, b2))
        ctx.save_for_backward(x, scores, a1, b1, a2, b2, w1, w2, bias2, z, u1, u2)
        ctx.options = (p, activation, concat, backend)
        return ops.aggregate(y, scores, p.slot_row, p.token_start, x.shape[0], backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, scores, a1, b1, a2, b2, w1, w2, bias2, z, u1, u2 = ctx.saved_tensors
        p, activation, concat, backend = ctx.options
        do, dout = _Products(p, backend), dout.contiguous()
        used = torch.arange(p.rows, device=x.device) < p.expert_start[-1]
        score = scores.flatten()[torch.where(used, p.row_slot, 0)][:, None]
        a = activate(_wide(z), activation, concat)

        v2 = do.gathered(dout, b2.mT.contiguous())
        da = _wide(do.gathered(dout, w2.mT).add_(do.rows(v2, a2.mT.contiguous())))
        dscore = (da * a).sum(-1)
        if bias2 is not None:
            dscore += do.gathered(dout, F.pad(bias2[:, None], (0, 0, 0, 7)))[:, 0]  # 8 columns
        dscores = F.pad(dscore, (0, 1))[p.slot_row.long()].view_as(scores)  # -1: the zero behind
        db2 = do.outer((score * u2).to(x.dtype), dout, b2.mT.contiguous(), gather=True).mT
        da2 = do.outer((score * v2).to(x.dtype), a.to(x.dtype), a2)

        dz = activate_backward(_wide(z), score * da, activation, concat).to(x.dtype)
        v1 = do.rows(dz, b1.mT.contiguous())
        dx, da1 = do.back_to_tokens(v1, x, a1, need_dw=True)
        dx = dx + do.back_to_tokens(dz, x, w1, need_dw=False)[0]
        return dx, dscores, da1, do.outer(dz, u1, b1), da2, db2, *([None] * 8)
