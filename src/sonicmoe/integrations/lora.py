"""LoRA on experts, in PEFT's layout: W + scale·B·A is never formed, and W gets no gradient.

Z = X W1ᵀ + (X A1ᵀ) B1ᵀ, row by row with the adapter of the row's expert, and the same for W2. X A1ᵀ
is a grouped GEMM of its own; the GEMM with B1 adds to the accumulator of X W1ᵀ.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .. import ops
from ..autograd import refuse_second_derivatives
from ..checkpoint import deferred_output, finish, placeholder
from ..enums import ActivationType
from ..errors import bad_argument
from ..gradients import UpGradients
from ..layer import autocast, permute, score_dtype
from ..ops.layout import dense_weight
from ..permutation import Permutation
from ..shapes import ceil_div
from ..validation import (
    check_choice,
    check_device,
    check_floating,
    check_rank,
    check_shape,
    check_weights,
    resolve_backend,
)


class LowRank(NamedTuple):
    """One LoRA adapter of rank r in PEFT's layout, for all experts.

    a is `lora_A.weight` (r·E, in), rows sorted by expert, then by rank; b is `lora_B.weight`
    (out, r·E), columns sorted by rank, then by expert; scale is PEFT's `scaling`.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


def lora_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    lora1: LowRank | None,
    lora2: LowRank | None,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    activation: ActivationType = ActivationType.SWIGLU,
    gate_up: str = "interleaved",
    backend: str | None = None,
) -> torch.Tensor:
    """`sonicmoe.experts` with LoRA on frozen weights; gradients for x, scores and the adapters.

    None instead of an adapter: no LoRA on that weight. Kept for the backward pass: x, Z, and
    X A1ᵀ and A A2ᵀ, r numbers per row each.
    """
    x, w1, w2, b1, b2 = autocast(x, w1, w2, b1, b2)
    check_weights(x, w1, w2, b1, b2, activation, gate_up)
    check_choice(x, ids, scores)
    for name, t in (("w1", w1), ("w2", w2), ("b1", b1), ("b2", b2)):
        if t is not None and t.requires_grad:
            raise bad_argument(
                name, "a frozen tensor", "one that requires a gradient", "requires_grad_(False)."
            )
    _check_adapter("lora1", lora1, w1)
    _check_adapter("lora2", lora2, w2)
    backend = resolve_backend(backend, x)
    p = permute(ids, w1.shape[0], dtype=x.dtype, backend=backend)
    factors = *_by_expert(lora1, w1, backend), *_by_expert(lora2, w2, backend)
    x, w1, w2 = x.contiguous(), dense_weight(w1), dense_weight(w2)  # once, not in each operator
    scores = score_dtype(scores, x)
    deferred = deferred_output()
    options = (p, activation, gate_up, backend)
    out = _LowRankLayer.apply(x, scores, *factors, w1, w2, (b1, b2), options, deferred)
    return finish(out, deferred)


def _check_adapter(name: str, lora: LowRank | None, w: torch.Tensor) -> None:
    if lora is None:
        return
    if not isinstance(lora, LowRank):
        raise bad_argument(name, "a LowRank or None", type(lora).__name__, "LowRank(a, b, scale).")
    experts, out_size, in_size = w.shape
    for factor, t, dims in (("a", lora.a, "(r·E, in)"), ("b", lora.b, "(out, r·E)")):
        if not isinstance(t, torch.Tensor):
            raise bad_argument(
                f"{factor} of {name}", "a tensor", type(t).__name__, "None as the adapter: no LoRA."
            )
        check_rank(f"{factor} of {name}", t, dims)
        check_floating(f"{factor} of {name}", t)
        check_device(f"{factor} of {name}", t, w)
    rank, rest = divmod(lora.a.shape[0], experts)
    if rank < 1 or rest:
        raise bad_argument(
            f"a of {name}",
            f"a positive multiple of E = {experts} rows, r for each expert",
            tuple(lora.a.shape),
            "Rows are sorted by expert, then by rank.",
        )
    check_shape(f"a of {name}", lora.a, (rank * experts, in_size), "(r·E, in)")
    check_shape(f"b of {name}", lora.b, (out_size, rank * experts), "(out, r·E)")
    if not isinstance(lora.scale, (int, float)):
        raise bad_argument(
            f"scale of {name}", "a number", type(lora.scale).__name__, "Pass lora_alpha / r."
        )


def _by_expert(
    lora: LowRank | None, w: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A (E, r, in) and scale·B (E, out, r), the rank filled up with zeros to a multiple of 8."""
    experts, out_size, in_size = w.shape
    if lora is None:
        return w.new_zeros(experts, 8, in_size), w.new_zeros(experts, out_size, 8)
    rank = lora.a.shape[0] // experts
    a = lora.a.contiguous().view(experts, rank, in_size).to(w.dtype)
    b = lora.b.contiguous().view(out_size * rank, experts)
    b = _ScaledTranspose.apply(b, float(lora.scale), w.dtype, backend).view(experts, out_size, rank)
    more = ceil_div(rank, 8) * 8 - rank
    return (F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))) if more else (a, b)


class _ScaledTranspose(torch.autograd.Function):
    """scale · tᵀ in another dtype."""

    @staticmethod
    def forward(ctx, t, scale, dtype, backend):
        ctx.options = (scale, t.dtype, backend)
        return ops.scaled_transpose(t, scale, dtype, backend)

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives()
        return ops.scaled_transpose(dout, *ctx.options), None, None, None


class _Gemms:
    """The grouped GEMMs over the rows of one permutation."""

    def __init__(self, p: Permutation, backend: str) -> None:
        self.p, self.backend = p, backend

    def gathered(self, x, w):
        """(T, in) → (R, r), rows gathered by the GEMM; its activation is not used."""
        relu = ActivationType.RELU
        return ops.up(x, w, None, self.p, relu, "interleaved", "keep", self.backend)[0]

    def rows(self, rows, w):
        """(R, in) → (R, r)."""
        return ops.down(rows, w, None, None, self.p, self.backend)

    def lora(self, kernel, rows, w, bias, u, factor):
        """(R, in) → (R, out): rows Wᵀ + u factorᵀ + bias."""
        return ops.lora_gemm(rows, w, bias, u, factor, self.p, kernel, self.backend)

    def combine(self, rows, scores, tokens):
        """(R, H) → (T, H), summed over a token's rows."""
        p = self.p
        return ops.combine(rows, scores, p.slot_row, p.token_start, tokens, self.backend)

    def outer(self, rows, other, w, gathered=False):
        """(E, out, in) = Σ over an expert's rows of rowsᵀ other, shaped and stored like w."""
        p = self.p
        if not gathered:
            p = Permutation.of_sorted_rows(p.expert_start, p.tiles, p.tile_m)
        needs = UpGradients(dx=False, dw1=True, db1=False)
        return ops.up_backward(rows, other, w, p, needs, False, 1, self.backend)[1]


class _LowRankLayer(torch.autograd.Function):
    """Kept: X, Z 2·R·N, X A1ᵀ and A A2ᵀ 2·R·r each, scores, maps. Not A, not Y, no weight."""

    @staticmethod
    def forward(ctx, x, scores, a1, b1, a2, b2, w1, w2, biases, options, deferred):
        (bias1, bias2), (p, activation, gate_up, backend) = biases, options
        gemm = _Gemms(p, backend)
        u1 = gemm.gathered(x, a1)
        z, a = ops.lora_up(x, w1, bias1, u1, b1, p, activation, gate_up, backend)
        u2 = gemm.rows(a, a2)

        def output():
            nonlocal a
            y = gemm.lora("down", a, w2, bias2, u2, b2)
            a = None  # before the output is there
            return gemm.combine(y, scores, x.shape[0])

        own = (x, scores, a1, b1, a2, b2, w1, w2, bias2, z, u1, u2)
        ctx.save_for_backward(*own, *p._replace(counts=None).tensors)
        ctx.options = (p.tile_m, activation, gate_up, backend)
        if deferred is None:
            return output()
        deferred.append(output)
        return placeholder(x, *x.shape)

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives()
        x, scores, a1, b1, a2, b2, w1, w2, bias2, z, u1, u2, *maps = ctx.saved_tensors
        tile_m, activation, gate_up, backend = ctx.options
        p = Permutation(*maps, tile_m)
        gemm = _Gemms(p, backend)

        v2 = gemm.gathered(dout, b2.mT)
        down = (w2, bias2, v2, a2.mT, scores)
        dz, a, dscores = ops.lora_down_backward(dout, z, *down, p, activation, gate_up, backend)
        da2 = gemm.outer(v2, a, a2)  # this A is multiplied by the scores
        del a, v2
        row_slot = p.row_slot.clamp(0, scores.numel() - 1)  # rows not in use hold anything
        scaled = (scores.flatten()[row_slot][:, None] * u2).to(x.dtype)
        db2 = gemm.outer(scaled, dout, b2.mT, gathered=True).mT

        v1 = gemm.rows(dz, b1.mT)
        da1, db1 = gemm.outer(v1, x, a1, gathered=True), gemm.outer(dz, u1, b1)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = gemm.lora("dx", dz, w1.mT, None, v1, a1.mT)
            dx = gemm.combine(dx, None, x.shape[0])
        return dx, dscores, da1, db1, da2, db2, *([None] * 5)
