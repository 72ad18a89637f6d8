"""LoRA on experts, in PEFT's layout: W + scale·B·A is never formed.

Z = X W1ᵀ + (X A1ᵀ) B1ᵀ, row by row with the adapter of the row's expert, and the same for W2. X A1ᵀ
is a grouped GEMM of its own; the GEMM with B1 adds to the accumulator of X W1ᵀ.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .. import ops
from ..errors import bad_argument
from ..shapes import ceil_div
from ..tensors import NO_LORA, Permutation
from ..validation import check_device, check_floating, check_rank, check_shape
from .nodes import refuse_second_derivatives
from .operands import Gradients, How, Source
from .weights import Projection


class LowRank(NamedTuple):
    """One LoRA adapter of rank r in PEFT's layout, for all experts.

    a is `lora_A.weight` (r·E, in), rows sorted by expert, then by rank; b is `lora_B.weight`
    (out, r·E), columns sorted by rank, then by expert; scale is PEFT's `scaling`.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


def check_adapter(name: str, lora: LowRank | None, w: torch.Tensor) -> None:
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


def with_adapter(
    w: Projection, lora: LowRank | None, dtype: torch.dtype, backend: str
) -> Projection:
    """w with A (E, r, in) and scale·B (E, out, r), the rank filled up with zeros to a multiple of
    8."""
    if lora is None:
        return w
    experts, out_size, in_size = w.weight.shape
    rank = lora.a.shape[0] // experts
    a = lora.a.contiguous().view(experts, rank, in_size).to(dtype)
    b = lora.b.contiguous().view(out_size * rank, experts)
    b = _ScaledTranspose.apply(b, float(lora.scale), dtype, backend).view(experts, out_size, rank)
    more = ceil_div(rank, 8) * 8 - rank
    if more:
        a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
    return w._replace(lora_a=a, lora_b=b)


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


# --- the GEMMs of adapters, whose operands are in the dtype of the data ---------------------------
def low_rank_of_x(x: torch.Tensor, w: Projection, p: Permutation, how: How) -> torch.Tensor | None:
    """U1 = X A1ᵀ (R, r), where W1 has an adapter: U1 B1ᵀ is its term of Z."""
    return None if w.lora_a is None else ops.gathered_gemm(x, w.lora_a, p, how.backend)


def low_rank_of_dout(
    dout: torch.Tensor, w: Projection, p: Permutation, how: How
) -> torch.Tensor | None:
    """V2 = dO B2 (R, r), where W2 has an adapter: V2 A2 is its term of dA'."""
    return None if w.lora_b is None else ops.gathered_gemm(dout, w.lora_b.mT, p, how.backend)


def low_rank_of_dz(
    dz: torch.Tensor, source: Source, p: Permutation, how: How
) -> torch.Tensor | None:
    """V1 = dZ B1 (R, r), where W1 has an adapter: V1 A1 is its term of dX."""
    if source.lora_b is None:
        return None
    return ops.down(dz, source.lora_b.mT, None, None, NO_LORA, p, how.backend)


def up_low_rank_gradients(
    dz: torch.Tensor,
    v: torch.Tensor | None,
    source: Source,
    lora_a: torch.Tensor | None,
    p: Permutation,
    needs: Gradients,
    how: How,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dA1 = V1ᵀ X and dB1 = dZᵀ U1 of the adapter of W1."""
    dlora_a = dlora_b = None
    if needs.lora_a:
        dlora_a = ops.weight_gradient(v, source.x, lora_a, p, "right", False, how.backend)
    if needs.lora_b:
        of_rows = (source.lora_b, p.sorted_rows, "right", False, how.backend)
        dlora_b = ops.weight_gradient(dz, source.u, *of_rows)
    return dlora_a, dlora_b


def down_low_rank_gradients(
    dout: torch.Tensor,
    v: torch.Tensor | None,
    a: torch.Tensor | None,
    u: torch.Tensor | None,
    w: Projection,
    scores: torch.Tensor | None,
    p: Permutation,
    needs: Gradients,
    how: How,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dA2 = V2ᵀ A' and dB2 = dOᵀ (score · U2) of the adapter of W2."""
    dlora_a = dlora_b = None
    if needs.lora_a:
        dlora_a = ops.weight_gradient(v, a, w.lora_a, p.sorted_rows, "right", False, how.backend)
    if needs.lora_b and u is not None and w.lora_b is not None:
        scaled = (u if scores is None else _row_scores(scores, p)[:, None] * u).to(dout.dtype)
        like = w.lora_b.mT
        dlora_b = ops.weight_gradient(scaled, dout, like, p, "right", False, how.backend).mT
    return dlora_a, dlora_b


def _row_scores(scores: torch.Tensor, p: Permutation) -> torch.Tensor:
    if p.row_slot is None:
        return scores
    slot = p.row_slot.clamp(0, scores.numel() - 1)  # rows not in use hold anything
    return scores.flatten()[slot]


def column_norm_bound(w: Projection) -> torch.Tensor | None:
    """A bound on the norms of the columns of B A (E, in), as V A = (dO B) A meets them.

    ‖B aᵢ‖² = aᵢᵀ (Bᵀ B) aᵢ. V is rounded to bf16, by at most 2⁻⁹·‖dO‖·‖B‖·‖aᵢ‖ in V aᵢ: twice that
    is added, which covers the rounding of this too.
    """
    if w.lora_a is None or w.lora_b is None:
        return None
    a, b = w.lora_a.float(), w.lora_b.float()
    with torch.autocast("cpu" if a.is_meta else a.device.type, enabled=False):
        squares = (a * ((b.mT @ b) @ a)).sum(1).clamp(min=0)
    rounding = b.square().sum((1, 2))[:, None] * a.square().sum(1)
    return squares.sqrt() + 2.0**-8 * rounding.sqrt()
