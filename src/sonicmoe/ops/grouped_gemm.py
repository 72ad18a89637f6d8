"""Operators of the grouped GEMMs and of combine, forward and backward.

Shapes are those of `Permutation`. With a `Lora`, a GEMM adds U Bᵀ in its accumulator. A result that
is not needed is None; through PyTorch's dispatcher it is an empty tensor.
"""

import torch
from torch import Tensor

from ..enums import ActivationType
from ..reference import grouped_gemm as reference
from ..shapes import BLOCK, ceil_div
from ..tensors import E4M3, DzResults, Lora, Permutation
from .registry import Mutated, operator


def _rows(s) -> int:
    """R, from the shapes of x and row_token."""
    return (s.x if s.row_token is None else s.row_token)[0]


def depth(s, k: int) -> int:
    """K of a GEMM, and the rank of its LoRA adapter."""
    return k + (0 if s.lora_u is None else s.lora_u[1])


@operator(
    reference,
    "grouped_gemm",
    flops=lambda s: 2 * _rows(s) * s.w1[1] * depth(s, s.w1[2]),
    packed="w1",
)
def up(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    lora: Lora,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    z_dtype: torch.dtype | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Z = X W1ᵀ + b1 (R, N), A = act(Z) (R, I) and the scales of Z; X is gathered by row.

    Z is None without a `z_dtype`. In e4m3 it has scales (⌈N/128⌉, R) of
    `reference.quantize.quantize_blocks`; else they are None.
    """
    rows, n = p.rows_of(x), w1.shape[1]
    a, z_scale = x.new_empty(rows, activation.intermediate_size(n)), None
    z = None if z_dtype is None else x.new_empty(rows, n, dtype=z_dtype)
    if z_dtype == E4M3:
        z_scale = x.new_empty(ceil_div(n, BLOCK), rows, dtype=torch.float32)
    return z, a, z_scale  # type: ignore


@operator(
    reference,
    "grouped_gemm",
    flops=lambda s: 2 * _rows(s) * s.w1[1] * depth(s, s.w1[2]),
    packed="w1",
)
def recomputed_z(
    dout: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    lora: Lora,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    backend: str,
) -> Tensor:
    """Z of `up` once more. `dout` is not read: it tells a compiler that this is backward."""
    return x.new_empty(p.rows_of(x), w1.shape[1])


@operator(reference, "grouped_gemm", flops=lambda s: 2 * _rows(s) * s.w[1] * s.w[2])
def gathered_gemm(x: Tensor, w: Tensor, p: Permutation, backend: str) -> Tensor:
    """X Wᵀ (R, N) for the few columns of a LoRA factor; X is gathered by row."""
    return x.new_empty(p.rows_of(x), w.shape[1])


@operator(
    reference, "grouped_gemm", flops=lambda s: 2 * s.a[0] * s.w2[1] * depth(s, s.w2[2]), packed="w2"
)
def down(
    a: Tensor,
    w2: Tensor,
    b2: Tensor | None,
    row_scores: Tensor | None,
    lora: Lora,
    p: Permutation,
    backend: str,
) -> Tensor:
    """Y = A W2ᵀ + b2 (R, H), times the row's score if given. Sorted rows of no expert are zero."""
    return a.new_empty(a.shape[0], w2.shape[1])


@operator(reference, "grouped_gemm")
def combine(
    y: Tensor,
    scores: Tensor | None,
    slot_row: Tensor,
    token_start: Tensor | None,
    tokens: int,
    backend: str,
) -> Tensor:
    """(T, H): each token's rows of Y, weighted by the scores and summed in fp32."""
    return y.new_empty(tokens, y.shape[1])


@operator(
    reference, "grouped_gemm", flops=lambda s: 2 * s.a[0] * s.w2[1] * depth(s, s.w2[2]), packed="w2"
)
def down_and_combine(
    a: Tensor,
    w2: Tensor,
    b2: Tensor | None,
    scores: Tensor | None,
    lora: Lora,
    p: Permutation,
    tokens: int,
    slices: int,
    backend: str,
) -> Tensor:
    """`combine` of `down`; of Y only one of `slices` slices of H exists at a time."""
    return a.new_empty(tokens, w2.shape[1])


@operator(
    reference, "grouped_gemm", flops=lambda s: 2 * s.z[0] * s.w2[2] * depth(s, s.w2[1]), packed="w2"
)
def dz(
    dout: Tensor,
    z: Tensor,
    z_scale: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    scores: Tensor | None,
    lora: Lora,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    needs: DzResults,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dZ, A' = score · A and dscores, from dA' = dO W2 and Z; Y is never formed.

    Z is in e4m3 where there is a `z_scale`.
    """
    results = (
        torch.empty_like(z, dtype=dout.dtype) if needs.dz else None,
        dout.new_empty(z.shape[0], w2.shape[2]) if needs.a else None,
        torch.empty_like(scores) if needs.dscores and scores is not None else None,
    )
    return results  # type: ignore


@operator(
    reference,
    "grouped_gemm",
    flops=lambda s: 2 * s.dz[0] * s.w1[2] * depth(s, s.w1[1]),
    packed="w1",
)
def dx(
    dz: Tensor,
    w1: Tensor,
    lora: Lora,
    p: Permutation,
    tokens: int,
    slices: int,
    backend: str,
) -> Tensor:
    """dX (T, H): dZ W1, summed over a token's rows, which exist in one of `slices` slices of H at a
    time."""
    return dz.new_empty(tokens, w1.shape[2])


@operator(reference, "grouped_gemm", flops=lambda s: 2 * _gradient_rows(s) * s.w[1] * s.w[2])
def weight_gradient(
    left: Tensor,
    right: Tensor,
    w: Tensor,
    p: Permutation,
    gathered: str,
    fp32: bool,
    backend: str,
) -> Tensor:
    """Σ over an expert's rows of leftᵀ right (E, N, K), with the strides of w, in fp32 if `fp32`.

    `gathered` is "left" or "right", the operand whose rows are tokens, unless rows arrive sorted.
    """
    return torch.empty_like(w, dtype=torch.float32 if fp32 else None)


def _gradient_rows(s) -> int:
    return (s.right if s.gathered == "left" else s.left)[0]


@operator(
    reference,
    "grouped_gemm",
    flops=lambda s: 2 * _gradient_rows(s) * s.main_grad[1] * s.main_grad[2],
)
def weight_gradient_into(
    main_grad: Mutated, left: Tensor, right: Tensor, p: Permutation, gathered: str, backend: str
) -> None:
    """`weight_gradient` that is added to `main_grad`, fp32 with the strides of the weight."""


@operator(reference, "grouped_gemm")
def bias_gradient(
    rows: Tensor,
    scores: Tensor | None,
    p: Permutation,
    gathered: bool,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """(E, N): the sum over an expert's rows, times their scores; rows of tokens if `gathered`."""
    return rows.new_empty(p.expert_start.shape[0] - 1, rows.shape[1], dtype=dtype)


@operator(reference, "grouped_gemm")
def scaled_transpose(t: Tensor, scale: float, dtype: torch.dtype, backend: str) -> Tensor:
    """scale · tᵀ of a contiguous matrix, rounded once; PyTorch's own takes 15 times a copy's."""
    return t.new_empty(t.shape[::-1], dtype=dtype)
