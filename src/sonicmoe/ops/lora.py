"""The low-rank GEMMs of LoRA adapters, whose operands are in the dtype of the data."""

import torch

from ..tensors import NO_LORA, Linear, Lora, Needs, Permutation, Weight
from .registry import stages


def adapter(u: torch.Tensor | None, b: torch.Tensor | None) -> Lora:
    return NO_LORA if u is None else Lora(u, b)


def gathered_low_rank(
    x: torch.Tensor, factor: torch.Tensor | None, p: Permutation, backend: str
) -> torch.Tensor | None:
    """U1 = X A1ᵀ (R, r), whose U1 B1ᵀ is the term of Z; V2 = dO B2, whose V2 A2 is that of dA'."""
    if factor is None:
        return None
    return stages(backend, "grouped_gemm").gathered_gemm(x, factor, p)


def low_rank_of_dz(
    dz: torch.Tensor, lora_b: torch.Tensor | None, p: Permutation, backend: str
) -> torch.Tensor | None:
    """V1 = dZ B1 (R, r), where W1 has an adapter: V1 A1 is its term of dX."""
    if lora_b is None:
        return None
    gemms = stages(backend, "grouped_gemm")
    return gemms.down(dz, Weight(lora_b.mT), None, None, NO_LORA, p)


def low_ranks_like(
    x: torch.Tensor, rows: int, *factors: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """The shapes of U1 and U2."""
    return [None if a is None else x.new_empty(rows, a.shape[1]) for a in factors]


def up_low_rank_gradients(
    dz: torch.Tensor,
    v: torch.Tensor | None,
    source: tuple,
    p: Permutation,
    needs: Needs,
    backend: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dA1 = V1ᵀ X and dB1 = dZᵀ U1 of the adapter of W1."""
    gemms, (x, w, u) = stages(backend, "grouped_gemm"), source
    dlora_a = dlora_b = None
    if needs.lora_a:
        dlora_a = gemms.weight_gradient(v, x, w.lora_a, p, "right", False)
    if needs.lora_b:
        dlora_b = gemms.weight_gradient(dz, u, w.lora_b, p.sorted_rows, "right", False)
    return dlora_a, dlora_b


def down_low_rank_gradients(
    dout: torch.Tensor,
    v: torch.Tensor | None,
    a: torch.Tensor | None,
    u: torch.Tensor | None,
    w: Linear,
    scores: torch.Tensor | None,
    p: Permutation,
    needs: Needs,
    backend: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dA2 = V2ᵀ A' and dB2 = dOᵀ (score · U2) of the adapter of W2."""
    gemms, dlora_a, dlora_b = stages(backend, "grouped_gemm"), None, None
    if needs.lora_a:
        dlora_a = gemms.weight_gradient(v, a, w.lora_a, p.sorted_rows, "right", False)
    if needs.lora_b and u is not None and w.lora_b is not None:
        scaled = (u if scores is None else _row_scores(scores, p)[:, None] * u).to(dout.dtype)
        dlora_b = gemms.weight_gradient(scaled, dout, w.lora_b.mT, p, "right", False).mT
    return dlora_a, dlora_b


def _row_scores(scores: torch.Tensor, p: Permutation) -> torch.Tensor:
    if p.row_slot is None:
        return scores
    slot = p.row_slot.clamp(0, scores.numel() - 1)  # rows not in use hold anything
    return scores.flatten()[slot]


def column_norm_bound(w: Linear) -> torch.Tensor | None:
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
