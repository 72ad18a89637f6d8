"""Operators of the experts in FP8: quantizers and grouped GEMMs of e4m3 operands.

`reference.fp8` has the scales. x8 and a8 are e4m3. w1 and w2 are the parameters: they lend dW their
strides and dtype, and are quantized again where the `Fp8Weight` beside them is empty. `bf16_dw`
computes weight gradients from operands in bf16. A result that is not needed is None; through
PyTorch's dispatcher it is an empty tensor.
"""

import torch
from torch import Tensor

from ..enums import ActivationType
from ..fp8_tensors import E4M3, Z_DTYPE, Fp8Dz, Fp8Kept, Fp8Weight
from ..gradients import Fp8DownGradients, Fp8UpGradients
from ..permutation import Permutation
from ..reference import fp8 as reference
from ..reference.fp8 import BLOCK, padded_rows
from ..shapes import ceil_div
from .grouped_gemm import _like
from .registry import Mutated, operator


def _e4m3(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=E4M3)


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _rows(s) -> int:
    """R, from the shapes of X, in either dtype, and row_token."""
    return (vars(s).get("x8") or s.x if s.row_token is None else s.row_token)[0]


@operator(reference, "fp8")
def quantize_rows(x: Tensor, norms: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """x in e4m3 (T, H), the scale (T,) of each row and, if `norms`, a bound on its norm (T,)."""
    norm = _fp32(x, x.shape[0]) if norms else None
    return _e4m3(x, *x.shape), _fp32(x, x.shape[0]), norm  # type: ignore


@operator(reference, "fp8")
def quantize_weight(
    w: Tensor, transposed: bool, norms: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Fp8Weight` for w (E, N, K), bf16 or fp32.

    w8_t is None unless `transposed`, w_norm unless `norms`.
    """
    experts, n, k = w.shape
    w8_t = _e4m3(w, experts, k, n) if transposed else None
    w_norm = _fp32(w, experts, k) if norms else None
    return _e4m3(w, experts, n, k), w8_t, _fp32(w, experts), w_norm  # type: ignore


@operator(reference, "fp8")
def checked_scales(
    weight1: Tensor,
    q1: Tensor,
    scale1: Tensor,
    weight2: Tensor,
    q2: Tensor,
    scale2: Tensor,
    sample: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The scales (E,) of two weights, NaN for experts whose q is not their weights in e4m3.

    Kernels compare one sample of an expert, at most 16384 values; consecutive samples cover all.
    """
    return torch.empty_like(scale1), torch.empty_like(scale2)


@operator(reference, "fp8", flops=lambda s: 2 * _rows(s) * s.w8[1] * s.w8[2])
def fp8_up(
    x8: Tensor,
    x_scale: Tensor,
    w: Fp8Weight,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    keep_z: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Z = X W1ᵀ (R, N), zmax (J, R), zmax_columns (E, I), A = act(Z) e4m3 (R, I), a_scale (J, R).

    zmax is the largest |Z| of a block of 128 columns of A, J = ⌈I/128⌉; zmax_columns that of a
    column over the rows of its expert. Z is in bf16 if `keep_z` is "keep" and in e4m3, scaled by
    zmax, if it is "fp8"; else the first three are None.
    """
    assert w.w8 is not None
    rows, n = p.rows_of(x8), w.w8.shape[1]
    intermediate = activation.intermediate_size(n)
    a_scale = _fp32(x8, ceil_div(intermediate, BLOCK), rows)
    z = zmax = zmax_columns = None
    if keep_z in Z_DTYPE:
        z = x8.new_empty(rows, n, dtype=Z_DTYPE[keep_z])
        zmax = torch.empty_like(a_scale)
        zmax_columns = _fp32(x8, w.w8.shape[0], intermediate)
    return z, zmax, zmax_columns, _e4m3(x8, rows, intermediate), a_scale  # type: ignore


@operator(reference, "fp8", flops=lambda s: 2 * _rows(s) * s.w1[1] * s.w1[2])
def fp8_recomputed(
    dout: Tensor,
    x: Tensor,
    w1: Tensor,
    w: Fp8Weight,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Fp8Kept` once more. `dout` is not read: it tells a compiler that this is
    backward."""
    rows, (experts, n, _) = p.rows_of(x), w1.shape
    inner = activation.intermediate_size(n)
    a_scale = _fp32(x, ceil_div(inner, BLOCK), rows)
    z = x.new_empty(rows, n, dtype=torch.bfloat16)
    zmax_columns = _fp32(x, experts, inner)
    return z, torch.empty_like(a_scale), zmax_columns, a_scale, _fp32(x, x.shape[0])


@operator(reference, "fp8", flops=lambda s: 2 * s.a8[0] * s.w8[1] * s.w8[2])
def fp8_gemm(
    a8: Tensor,
    a_scale: Tensor,
    w: Fp8Weight,
    row_scores: Tensor | None,
    p: Permutation,
    backend: str,
) -> Tensor:
    """Y = A Wᵀ bf16 (R, N), times the row's score if given; a_scale (J, R), or (1, R).

    Sorted rows of no expert are zero.
    """
    assert w.w8 is not None
    return a8.new_empty(a8.shape[0], w.w8.shape[1], dtype=torch.bfloat16)


@operator(reference, "fp8", flops=lambda s: 2 * s.a8[0] * s.w8[1] * s.w8[2])
def fp8_down_and_combine(
    a8: Tensor,
    a_scale: Tensor,
    w: Fp8Weight,
    scores: Tensor | None,
    p: Permutation,
    tokens: int,
    slices: int,
    backend: str,
) -> Tensor:
    """`combine` of `fp8_gemm`; of Y only one of `slices` slices of H exists at a time."""
    assert w.w8 is not None
    return a8.new_empty(tokens, w.w8.shape[1], dtype=torch.bfloat16)


def _of_dz(
    z: Tensor, experts: int, scores: Tensor | None, needs: Fp8DownGradients
) -> tuple[Tensor | None, ...]:
    """The fields of `Fp8Dz`, and dscores."""
    rows, n = z.shape
    return (
        _e4m3(z, rows, n) if needs.dz else None,
        _fp32(z, rows) if needs.dz else None,
        _e4m3(z, n, padded_rows(rows, experts)) if needs.dz_t else None,
        _fp32(z, experts, n) if needs.dz_t else None,
        _like(scores, needs.dscores),
    )


@operator(
    reference,
    "fp8",
    flops=lambda s: (
        2 * s.z[0] * s.w2[1] * s.w2[2] * ((s.dz or s.dz_t or s.dw2 or s.dscores) + s.dw2)
    ),
)
def fp8_down_backward(
    dout: Tensor,
    kept: Fp8Kept,
    w2: Tensor,
    w: Fp8Weight,
    scores: Tensor | None,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    needs: Fp8DownGradients,
    fp32_dw: bool,
    bf16_dw: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Fp8Dz`, dW2 and dscores."""
    *of_dz, dscores = _of_dz(kept.z, w2.shape[0], scores, needs)
    dw2 = _like(w2, needs.dw2, torch.float32 if fp32_dw else None)
    return *of_dz, dw2, dscores  # type: ignore


@operator(reference, "fp8", flops=lambda s: 4 * s.z[0] * s.w2[1] * s.w2[2])
def fp8_down_backward_into(
    main_grad: Mutated,
    dout: Tensor,
    kept: Fp8Kept,
    w2: Tensor,
    w: Fp8Weight,
    scores: Tensor | None,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    needs: Fp8DownGradients,
    bf16_dw: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`fp8_down_backward` that adds dW2 to `main_grad`, fp32 with the strides of W2."""
    return _of_dz(kept.z, w2.shape[0], scores, needs)  # type: ignore


def _dx(x: Tensor, needs: Fp8UpGradients) -> Tensor | None:
    return x.new_empty(x.shape, dtype=torch.bfloat16) if needs.dx else None


@operator(reference, "fp8", flops=lambda s: 2 * _rows(s) * s.w1[1] * s.w1[2] * (s.dx + s.dw1))
def fp8_up_backward(
    dz: Fp8Dz,
    x: Tensor,
    w1: Tensor,
    w: Fp8Weight,
    p: Permutation,
    needs: Fp8UpGradients,
    fp32_dw: bool,
    bf16_dw: bool,
    slices: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """dX = Σ dZ W1 over a token's rows, bf16, and dW1 = dZᵀ X.

    dX needs dz8, dW1 needs dz_t, or dz8 with `bf16_dw`. Rows of dX that are combined exist in one
    of `slices` slices of H at a time.
    """
    return _dx(x, needs), _like(w1, needs.dw1, torch.float32 if fp32_dw else None)  # type: ignore


@operator(reference, "fp8", flops=lambda s: 2 * _rows(s) * s.w1[1] * s.w1[2] * (s.dx + 1))
def fp8_up_backward_into(
    main_grad: Mutated,
    dz: Fp8Dz,
    x: Tensor,
    w1: Tensor,
    w: Fp8Weight,
    p: Permutation,
    needs: Fp8UpGradients,
    bf16_dw: bool,
    slices: int,
    backend: str,
) -> Tensor:
    """`fp8_up_backward` that adds dW1 to `main_grad`, fp32 with the strides of W1; returns dX."""
    return _dx(x, needs)  # type: ignore
