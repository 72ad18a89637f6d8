"""Operators of the experts in FP8: quantizers and grouped GEMMs of e4m3 operands.

`reference.fp8` has the scales. x8 and a8 are e4m3. w1 and w2 are the parameters: they are quantized
again, with the scales of the `Fp8Weight` beside them, where it has no values. Biases and the `Lora`
of a GEMM are in bf16. A result that is not needed is None; through PyTorch's dispatcher it is an
empty tensor.
"""

import torch
from torch import Tensor

from ..enums import ActivationType
from ..reference import fp8 as reference
from ..shapes import BLOCK, ceil_div, padded_rows
from ..tensors import E4M3, Fp8DzResults, Fp8Kept, Fp8Weight, Lora, Permutation
from .grouped_gemm import depth
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
def quantize_weight_into(
    w8: Mutated,
    w8_t: Mutated | None,
    w_scale: Mutated,
    w_norm: Mutated | None,
    w: Tensor,
    backend: str,
) -> None:
    """`quantize_weight` into these buffers."""


@operator(reference, "fp8")
def checked_scales(
    weight1: Tensor,
    q1: Tensor,
    scale1: Tensor,
    weight2: Tensor,
    q2: Tensor,
    scale2: Tensor,
    sample: Mutated,
    generation: Tensor,
    flags: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The scales (E,) of two weights, NaN for experts whose q is not their weights in e4m3.

    If there is such an expert, or one that was not finite when it was quantized and is now, the
    int32 `generation` (1,) is written to one of two int32 in host memory that the device can write,
    one for each weight. `flags` (1,) int64 is their address.

    Kernels compare one sample of an expert, at most 16384 values. `sample` (2, E) is the number of
    the next one, which they increment: consecutive samples cover all. It lies on the device, so
    that each replay of a graph compares another.
    """
    return torch.empty_like(scale1), torch.empty_like(scale2)


@operator(reference, "fp8", flops=lambda s: 2 * _rows(s) * s.w8[1] * depth(s, s.w8[2]), packed="w")
def fp8_up(
    x8: Tensor,
    x_scale: Tensor,
    w: Fp8Weight,
    b1: Tensor | None,
    lora: Lora,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    z_dtype: torch.dtype | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Z = X W1ᵀ + b1 (R, N), zmax (J, R), zmax_columns (E, I), A = act(Z) (R, I), a_scale (J, R).

    A is in e4m3. zmax is the largest |Z| of a block of 128 columns of A, J = ⌈I/128⌉; zmax_columns
    that of a column over the rows of its expert. Z is in bf16, or in e4m3 and scaled by zmax;
    without a `z_dtype` the first three are None.
    """
    rows, (experts, n, _) = p.rows_of(x8), w.shape
    intermediate = activation.intermediate_size(n)
    a_scale = _fp32(x8, ceil_div(intermediate, BLOCK), rows)
    z = zmax = zmax_columns = None
    if z_dtype is not None:
        z = x8.new_empty(rows, n, dtype=z_dtype)
        zmax = torch.empty_like(a_scale)
        zmax_columns = _fp32(x8, experts, intermediate)
    return z, zmax, zmax_columns, _e4m3(x8, rows, intermediate), a_scale  # type: ignore


@operator(reference, "fp8", flops=lambda s: 2 * _rows(s) * s.w1[1] * depth(s, s.w1[2]), packed="w1")
def fp8_recomputed(
    dout: Tensor,
    x: Tensor,
    w1: Tensor,
    w: Fp8Weight,
    b1: Tensor | None,
    lora: Lora,
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


@operator(reference, "fp8", flops=lambda s: 2 * s.a8[0] * s.w8[1] * depth(s, s.w8[2]), packed="w")
def fp8_gemm(
    a8: Tensor,
    a_scale: Tensor,
    w: Fp8Weight,
    b2: Tensor | None,
    row_scores: Tensor | None,
    lora: Lora,
    p: Permutation,
    backend: str,
) -> Tensor:
    """Y = A Wᵀ + b2 bf16 (R, N), times the row's score if given; a_scale (J, R), or (1, R).

    Sorted rows of no expert are zero.
    """
    return a8.new_empty(a8.shape[0], w.shape[1], dtype=torch.bfloat16)


@operator(reference, "fp8", flops=lambda s: 2 * s.a8[0] * s.w8[1] * depth(s, s.w8[2]), packed="w")
def fp8_down_and_combine(
    a8: Tensor,
    a_scale: Tensor,
    w: Fp8Weight,
    b2: Tensor | None,
    scores: Tensor | None,
    lora: Lora,
    p: Permutation,
    tokens: int,
    slices: int,
    backend: str,
) -> Tensor:
    """`combine` of `fp8_gemm`; of Y only one of `slices` slices of H exists at a time."""
    return a8.new_empty(tokens, w.shape[1], dtype=torch.bfloat16)


@operator(reference, "fp8", flops=lambda s: 2 * s.z[0] * s.w2[2] * depth(s, s.w2[1]), packed="w2")
def fp8_dz(
    dout: Tensor,
    kept: Fp8Kept,
    w2: Tensor,
    w: Fp8Weight,
    b2: Tensor | None,
    scores: Tensor | None,
    lora: Lora,
    lora_norm: Tensor | None,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    needs: Fp8DzResults,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Fp8Dz`; A'ᵀ, its scales and dO in e4m3, for dW2; dscores.

    With a `Lora`, `lora_norm` (E, I) bounds what it adds to the norms of the columns of W2.
    """
    (rows, n), experts = kept.z.shape, w2.shape[0]
    padded = padded_rows(rows, experts)
    results = (
        _e4m3(dout, rows, n) if needs.dz else None,
        _fp32(dout, rows) if needs.dz else None,
        _e4m3(dout, n, padded) if needs.dz_t else None,
        _fp32(dout, experts, n) if needs.dz_t else None,
        _e4m3(dout, w2.shape[2], padded) if needs.a_t else None,
        _fp32(dout, experts, w2.shape[2]) if needs.a_t else None,
        _e4m3(dout, *dout.shape) if needs.a_t else None,
        torch.empty_like(scores) if needs.dscores and scores is not None else None,
    )
    return results  # type: ignore


@operator(reference, "fp8", flops=lambda s: 2 * s.dz8[0] * s.w1[2] * depth(s, s.w1[1]), packed="w1")
def fp8_dx(
    dz8: Tensor,
    dz_scale: Tensor,
    w1: Tensor,
    w: Fp8Weight,
    lora: Lora,
    p: Permutation,
    tokens: int,
    slices: int,
    backend: str,
) -> Tensor:
    """dX (T, H) bf16: dZ W1, summed over a token's rows, which exist in one of `slices` slices of H
    at a time."""
    return dz8.new_empty(tokens, w1.shape[2], dtype=torch.bfloat16)


def _routed(s) -> int:
    """R, from the shapes of rows and row_token."""
    return (s.rows if s.row_token is None else s.row_token)[0]


@operator(reference, "fp8", flops=lambda s: 2 * _routed(s) * s.w[1] * s.w[2])
def fp8_weight_gradient(
    rows: Tensor,
    other_t: Tensor,
    scale: Tensor,
    w: Tensor,
    p: Permutation,
    transposed: bool,
    fp32: bool,
    backend: str,
) -> Tensor:
    """Σ over an expert's rows of rows[token] (M,) times other_t (N, P), times the scale (E, N).

    (E, M, N), or (E, N, M) if `transposed`; the strides and dtype of w, or fp32. Rows in bf16 are
    quantized first.
    """
    return torch.empty_like(w, dtype=torch.float32 if fp32 else None)


@operator(reference, "fp8", flops=lambda s: 2 * _routed(s) * s.main_grad[1] * s.main_grad[2])
def fp8_weight_gradient_into(
    main_grad: Mutated,
    rows: Tensor,
    other_t: Tensor,
    scale: Tensor,
    p: Permutation,
    transposed: bool,
    backend: str,
) -> None:
    """`fp8_weight_gradient` that is added to `main_grad`, fp32 with the strides of the weight."""


@operator(reference, "fp8")
def dequantize_rows(dout: Tensor, q: Tensor, scale: Tensor, backend: str) -> Tensor:
    """Rows (R, N) in bf16; scale (R,), or (⌈N/128⌉, R). `dout` is not read: in a backward pass it
    tells a compiler so."""
    return q.new_empty(q.shape, dtype=torch.bfloat16)


@operator(reference, "fp8")
def scored_activation(
    dout: Tensor,
    z: Tensor,
    zmax: Tensor,
    scores: Tensor | None,
    p: Permutation,
    activation: ActivationType,
    gate_up: str,
    backend: str,
) -> Tensor:
    """A' = score · act(Z) (R, I) in bf16. `dout` is not read: see `dequantize_rows`."""
    return z.new_empty(z.shape[0], activation.intermediate_size(z.shape[1]), dtype=torch.bfloat16)
