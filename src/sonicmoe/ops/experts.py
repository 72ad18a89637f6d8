"""Operators of the experts, one for each pass of an autograd node, and combine.

`kinds` has the implementations, by precision; shapes are those of `Permutation`.
"""

from typing import Any

import torch
from torch import Tensor

from ..tensors import Dz, Kept, Linear, Needs, Permutation, Rows
from .kinds import Forward, Gradients, How, Source, kind_of
from .registry import operator


def _of_kind(how: Any, name: str) -> Any:
    return getattr(kind_of(how.precision), name)


# --- FLOPs: with LoRA, U Bᵀ joins the accumulator of a GEMM ---------------------------------------
def _up_flops(x, w: Linear, next_lora_a, p: Permutation, how: How) -> int:
    rows, (_, n, hidden) = p.rows_of(x), w.weight.shape
    rank, next_rank = _rank(w.lora_a), _rank(next_lora_a)
    inner = how.activation.intermediate_size(n)
    return 2 * rows * (n * (hidden + rank) + rank * hidden + next_rank * inner)


def _down_flops(rows: Rows, w: Linear, *_: Any) -> int:
    hidden, inner = w.weight.shape[1:]
    return 2 * rows.values.shape[0] * hidden * (inner + _rank(w.lora_a))


def _recomputed_flops(dout, source: Source, p: Permutation, how: How) -> int:
    x, w, u = source
    n, hidden = w.weight.shape[1:]
    return 2 * p.rows_of(x) * n * (hidden + (0 if u is None else u.shape[1]))


def _down_backward_flops(
    dout, kept, w: Linear, u, scores, p: Permutation, needs: Needs, dz, dz_t, *_: Any
) -> int:  # fmt: skip
    hidden, inner = w.weight.shape[1:]
    rows, rank = p.rows_of(dout), _rank(w.lora_a)
    flops = rank * hidden + (needs.lora_a * inner + needs.lora_b * hidden) * rank
    if dz or dz_t or needs.weight or needs.lora_a or needs.source:
        flops += inner * (hidden + rank)
    flops += needs.weight * hidden * inner
    return 2 * rows * flops


def _up_backward_flops(
    dz: Dz, source: Source, p: Permutation, needs: Needs, *_: Any
) -> int:  # fmt: skip
    x, w = source.x, source.w
    n, hidden = w.weight.shape[1:]
    rows, rank = p.rows_of(x), _rank(w.lora_a)
    flops = rank * n + (needs.lora_a * hidden + needs.lora_b * n) * rank
    flops += needs.source * hidden * (n + rank) + needs.weight * n * hidden
    return 2 * rows * flops


def _rank(lora_a: Tensor | None) -> int:
    return 0 if lora_a is None else lora_a.shape[1]


# --- the operators --------------------------------------------------------------------------------
@operator(_of_kind, _up_flops)
def up(
    x: Tensor, w: Linear, next_lora_a: Tensor | None, p: Permutation, how: How
) -> Forward:  # fmt: skip
    """Z = X W1ᵀ + b1, of which is kept what `how` says, and A = act(Z); X is gathered by row.

    `next_lora_a` is that of W2.
    """
    return kind_of(how.precision).forward_like(x, w, next_lora_a, p, how)


@operator(_of_kind, _down_flops)
def down(
    rows: Rows,
    w: Linear,
    u: Tensor | None,
    scores: Tensor | None,
    p: Permutation,
    tokens: int,
    how: How,
) -> Tensor:
    """(T, H): the sum of each token's rows of Y = A W2ᵀ + b2 times their scores; Y exists in one of
    `how.slices` slices of H at a time. Rows that arrived sorted are not summed."""
    dtype = rows.values.dtype if rows.scale is None else torch.bfloat16
    return rows.values.new_empty(tokens, w.weight.shape[1], dtype=dtype)


@operator(_of_kind, _recomputed_flops)
def recomputed(dout: Tensor, source: Source, p: Permutation, how: How) -> Kept:
    """`Forward.kept` once more, with Z in the dtype of the data. `dout` is not read: it keeps
    torch.compile from computing this in the forward pass."""
    x, w = source.x, source.w
    return kind_of(how.precision).forward_like(x, w, None, p, how._replace(z_dtype=x.dtype)).kept


@operator(_of_kind, _down_backward_flops, into="main_grad")
def down_backward(
    dout: Tensor,
    kept: Kept,
    w: Linear,
    u: Tensor | None,
    scores: Tensor | None,
    p: Permutation,
    needs: Needs,
    dz: bool,
    dz_t: bool,
    main_grad: Tensor | None,
    fp32: bool,
    how: How,
) -> tuple[Gradients, Dz]:
    """The gradients of down, and dZ, or in FP8 also dZᵀ, if they are needed. Y is never formed.

    The gradient of the weight is added to `main_grad`, or new, in fp32 if `fp32`.
    """
    assert kept.z is not None  # recomputed, if it was not kept
    rows, n = kept.z.shape
    made = kind_of(how.precision).dz_like(dout.new_empty, rows, w.weight.shape[0], n)
    wanted = (dz, dz, dz_t, dz_t)
    of_dz = Dz(*[t if need else None for t, need in zip(made, wanted, strict=True)])
    of_scores = None if scores is None else torch.empty_like(scores)
    bias = None if w.bias is None else torch.empty_like(w.bias)
    return _gradients_like(of_scores, w, bias, needs, main_grad, fp32), of_dz


@operator(_of_kind, _up_backward_flops, into="main_grad")
def up_backward(
    dz: Dz,
    source: Source,
    p: Permutation,
    needs: Needs,
    main_grad: Tensor | None,
    fp32: bool,
    how: How,
) -> Gradients:
    """The gradients of up: dX (T, H), the sum of each token's rows of dZ W1, which exist in one of
    `how.slices` slices of H at a time, and those of the projection."""
    x, w = source.x, source.w
    bias = x.new_empty(w.weight.shape[:2])
    return _gradients_like(torch.empty_like(x), w, bias, needs, main_grad, fp32)


def _gradients_like(source, w: Linear, bias, needs: Needs, main_grad, fp32) -> Gradients:
    weight = None
    if needs.weight and main_grad is None and w.weight.dense is not None:
        weight = torch.empty_like(w.weight.dense, dtype=torch.float32 if fp32 else None)
    return Gradients(
        source if needs.source else None,
        weight,
        bias if needs.bias else None,
        torch.empty_like(w.lora_a) if needs.lora_a and w.lora_a is not None else None,
        torch.empty_like(w.lora_b) if needs.lora_b and w.lora_b is not None else None,
    )


@operator("grouped_gemm")
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


@operator("grouped_gemm")
def scaled_transpose(t: Tensor, scale: float, dtype: torch.dtype, backend: str) -> Tensor:
    """scale · tᵀ of a contiguous matrix, rounded once; PyTorch's own takes 15 times a copy's."""
    return t.new_empty(t.shape[::-1], dtype=dtype)
