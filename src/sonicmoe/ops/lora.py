"""Operators of the grouped GEMMs with a LoRA adapter, whose GEMM U Bᵀ joins their accumulator.

U (R, r), contiguous, has a row for each routed row; `factor` is B (E, N, r), best stored like the
weights beside it. The rest as in `grouped_gemm`.
"""

import torch
from torch import Tensor

from ..enums import ActivationType
from ..permutation import Permutation
from ..reference import lora as reference
from .registry import operator


@operator(reference, "lora", flops=lambda s: 2 * s.u[0] * s.w1[1] * (s.w1[2] + s.u[1]))
def lora_up(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    u: Tensor,
    factor: Tensor,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Z = X W1ᵀ + U Bᵀ + b1 and A = act(Z); X is gathered by row."""
    rows, n = u.shape[0], w1.shape[1]
    return x.new_empty(rows, n), x.new_empty(rows, activation.intermediate_size(n))


@operator(reference, "lora", flops=lambda s: 2 * s.a[0] * s.w[1] * (s.w[2] + s.u[1]))
def lora_gemm(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    u: Tensor,
    factor: Tensor,
    p: Permutation,
    kernel: str,
    backend: str,
) -> Tensor:
    """Y = A Wᵀ + U Bᵀ + bias, kernel "down" or "dx"; rows of no expert are not to be trusted."""
    return a.new_empty(a.shape[0], w.shape[1])


@operator(reference, "lora", flops=lambda s: 2 * s.z[0] * s.w2[2] * (s.w2[1] + s.u[1]))
def lora_down_backward(
    dout: Tensor,
    z: Tensor,
    w2: Tensor,
    b2: Tensor | None,
    u: Tensor,
    factor: Tensor,
    scores: Tensor,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dZ, A' = score · A and dscores, from dA' = dO W2 + U Bᵀ."""
    return torch.empty_like(z), z.new_empty(z.shape[0], w2.shape[2]), torch.empty_like(scores)


@operator(reference, "lora")
def scaled_transpose(t: Tensor, scale: float, dtype: torch.dtype, backend: str) -> Tensor:
    """scale · tᵀ of a contiguous matrix, rounded once; PyTorch's own takes 15 times a copy's."""
    return t.new_empty(t.shape[::-1], dtype=dtype)
