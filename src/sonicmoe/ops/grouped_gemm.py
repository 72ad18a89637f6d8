"""Operators of the grouped GEMMs and of combine, forward and backward.

Shapes are those of `Permutation`. A result that is not needed is None; through PyTorch's dispatcher
it is an empty tensor.
"""

import torch
from torch import Tensor

from ..enums import ActivationType
from ..gradients import DownGradients, UpGradients
from ..memory_policy import FP8_COLUMNS
from ..permutation import Permutation
from ..reference import grouped_gemm as reference
from ..shapes import ceil_div
from .registry import Mutated, operator


def _rows(s) -> int:
    """R, from the shapes of x and row_token."""
    return (s.x if s.row_token is None else s.row_token)[0]


@operator(reference, "grouped_gemm", flops=lambda s: 2 * _rows(s) * s.w1[1] * s.w1[2])
def up(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    keep_z: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Z = X W1ᵀ + b1 (R, N), A = act(Z) (R, I) and the scales of Z; X is gathered by row.

    `keep_z` "keep" returns Z, "fp8" returns it in e4m3 with scales (⌈N/128⌉, R) of
    `reference.quantize.quantize_blocks`; with any other value both are None.
    """
    rows, n = p.rows_of(x), w1.shape[1]
    a, z, z_scale = x.new_empty(rows, activation.intermediate_size(n)), None, None
    if keep_z == "keep":
        z = x.new_empty(rows, n)
    elif keep_z == "fp8":
        z = x.new_empty(rows, n, dtype=torch.float8_e4m3fn)
        z_scale = x.new_empty(ceil_div(n, FP8_COLUMNS), rows, dtype=torch.float32)
    return z, a, z_scale  # type: ignore


@operator(reference, "grouped_gemm", flops=lambda s: 2 * _rows(s) * s.w1[1] * s.w1[2])
def recomputed_z(
    dout: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    backend: str,
) -> Tensor:
    """Z of `up` once more. `dout` is not read: it tells a compiler that this is backward."""
    return x.new_empty(p.rows_of(x), w1.shape[1])


@operator(reference, "grouped_gemm", flops=lambda s: 2 * s.a[0] * s.w2[1] * s.w2[2])
def down(
    a: Tensor,
    w2: Tensor,
    b2: Tensor | None,
    row_scores: Tensor | None,
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


@operator(reference, "grouped_gemm", flops=lambda s: 2 * s.a[0] * s.w2[1] * s.w2[2])
def down_and_combine(
    a: Tensor,
    w2: Tensor,
    b2: Tensor | None,
    scores: Tensor | None,
    p: Permutation,
    tokens: int,
    slices: int,
    backend: str,
) -> Tensor:
    """`combine` of `down`; of Y only one of `slices` slices of H exists at a time."""
    return a.new_empty(tokens, w2.shape[1])


def _like(t: Tensor | None, needed: bool, dtype: torch.dtype | None = None) -> Tensor | None:
    return torch.empty_like(t, dtype=dtype) if needed and t is not None else None


@operator(
    reference,
    "grouped_gemm",
    flops=lambda s: 2 * s.z[0] * s.w2[1] * s.w2[2] * ((s.dz or s.dw2 or s.dscores) + s.dw2),
)
def down_backward(
    dout: Tensor,
    z: Tensor,
    z_scale: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    scores: Tensor | None,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    needs: DownGradients,
    fp32_dw: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dZ, dW2, db2, dscores from dO: dO W2 is formed once, Y never, A again from Z.

    Z is in e4m3 where there is a `z_scale`. dW2 has the strides of W2, in fp32 if `fp32_dw`.
    """
    dw2 = _like(w2, needs.dw2, torch.float32 if fp32_dw else None)
    return _like(z, needs.dz, dout.dtype), dw2, _like(b2, needs.db2), _like(scores, needs.dscores)  # type: ignore


@operator(reference, "grouped_gemm", flops=lambda s: 4 * s.z[0] * s.w2[1] * s.w2[2])
def down_backward_into(
    main_grad: Mutated,
    dout: Tensor,
    z: Tensor,
    z_scale: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    scores: Tensor | None,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    needs: DownGradients,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`down_backward` that adds dW2 to `main_grad`, fp32 with the strides of W2."""
    return _like(z, needs.dz, dout.dtype), _like(b2, needs.db2), _like(scores, needs.dscores)  # type: ignore


def _dx_and_db1(x: Tensor, w1: Tensor, needs: UpGradients) -> tuple[Tensor | None, Tensor | None]:
    dx = x.new_empty(x.shape) if needs.dx else None
    return dx, w1.new_empty(w1.shape[:2]) if needs.db1 else None


@operator(
    reference,
    "grouped_gemm",
    flops=lambda s: 2 * s.dz[0] * s.w1[1] * s.w1[2] * (s.dx + s.dw1),
)
def up_backward(
    dz: Tensor,
    x: Tensor,
    w1: Tensor,
    p: Permutation,
    needs: UpGradients,
    fp32_dw: bool,
    slices: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dX = Σ dZ W1 over a token's rows, dW1 = dZᵀ X, in fp32 if `fp32_dw`, db1 = Σ dZ.

    Rows of dX that are combined exist in one of `slices` slices of H at a time.
    """
    dx, db1 = _dx_and_db1(x, w1, needs)
    return dx, _like(w1, needs.dw1, torch.float32 if fp32_dw else None), db1  # type: ignore


@operator(reference, "grouped_gemm", flops=lambda s: 2 * s.dz[0] * s.w1[1] * s.w1[2] * (s.dx + 1))
def up_backward_into(
    main_grad: Mutated,
    dz: Tensor,
    x: Tensor,
    w1: Tensor,
    p: Permutation,
    needs: UpGradients,
    slices: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`up_backward` that adds dW1 to `main_grad`, fp32 with the strides of W1."""
    return _dx_and_db1(x, w1, needs)  # type: ignore
