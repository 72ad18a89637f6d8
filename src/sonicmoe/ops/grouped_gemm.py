"""Operators of the grouped products and the aggregation, forward and backward.

Shapes as in `Permutation`; `row_token` None means that rows arrive sorted by expert. A result that
a caller does not need is asked for with a flag and comes back as None, from PyTorch's dispatcher
empty.
"""

from functools import cache

import torch

from ..enums import ActivationType
from ..reference import products as reference
from .register import operator


@cache
def _triton():
    from ..launch import grouped_gemm

    return grouped_gemm


def _intermediate_size(n: int, activation: str) -> int:
    return n // 2 if ActivationType(activation).is_gated else n


# --- up -------------------------------------------------------------------------------------------
def _up_fake(
    x,
    w1,
    b1,
    row_token,
    expert_start,
    tiles,
    tile_height,
    activation,
    concatenated,
    keep_z,
    backend,
):
    rows = (x if row_token is None else row_token).shape[0]
    n = w1.shape[1]
    z = x.new_empty(rows, n) if keep_z else None
    return z, x.new_empty(rows, _intermediate_size(n, activation))


def _up_flops(x, w1, b1, row_token, *args, out_shape=None, **kwargs) -> int:
    rows = (x if row_token is None else row_token)[0]
    return 2 * rows * w1[1] * w1[2]


@operator(
    "up(Tensor x, Tensor w1, Tensor? b1, Tensor? row_token, Tensor expert_start, Tensor tiles,"
    " int tile_height, str activation, bool concatenated, bool keep_z, str backend)"
    " -> (Tensor, Tensor)",
    fake=_up_fake,
    flops=_up_flops,
)
def up(
    x,
    w1,
    b1,
    row_token,
    expert_start,
    tiles,
    tile_height,
    activation,
    concatenated,
    keep_z,
    backend,
):
    """Z = X W1ᵀ + b1 (None unless `keep_z`) and A = act(Z), rows gathered on the fly."""
    if backend == "torch":
        rows = (x if row_token is None else row_token).shape[0]
        z, a = reference.up(
            x, w1, b1, row_token, expert_start, rows, ActivationType(activation), concatenated
        )
        return (z if keep_z else None), a
    return _triton().up(
        x, w1, b1, row_token, expert_start, tiles, tile_height,
        ActivationType(activation), concatenated, keep_z,
    )  # fmt: skip


# --- down -----------------------------------------------------------------------------------------
def _product_flops(a, w, *args, out_shape=None, **kwargs) -> int:
    return 2 * a[0] * w[1] * w[2]


@operator(
    "down(Tensor a, Tensor w2, Tensor? b2, Tensor? row_scores, Tensor expert_start, Tensor tiles,"
    " int tile_height, bool zero_tail, str backend) -> Tensor",
    fake=lambda a, w2, *_: a.new_empty(a.shape[0], w2.shape[1]),
    flops=_product_flops,
)
def down(a, w2, b2, row_scores, expert_start, tiles, tile_height, zero_tail, backend):
    """Y = A W2ᵀ + b2, times the row's score if given; rows past the last expert zero if asked."""
    if backend == "torch":
        return reference.down(a, w2, b2, row_scores, expert_start)
    return _triton().down(a, w2, b2, row_scores, expert_start, tiles, tile_height, zero_tail)


# --- aggregation ----------------------------------------------------------------------------------
@operator(
    "aggregate(Tensor y, Tensor? scores, Tensor slot_row, Tensor? token_start, SymInt tokens,"
    " str backend) -> Tensor",
    fake=lambda y, scores, slot_row, token_start, tokens, backend: y.new_empty(tokens, y.shape[1]),
)
def aggregate(y, scores, slot_row, token_start, tokens, backend):
    """(T, H): each token's rows of Y, weighted and summed in fp32."""
    if backend == "torch":
        return reference.aggregate(y, scores, slot_row, token_start, tokens)
    return _triton().aggregate(y, scores, slot_row, token_start, tokens)


# --- backward of down and aggregation -------------------------------------------------------------
def _weight_gradient_fake(w, wide):
    return torch.empty_like(w, dtype=torch.float32 if wide else w.dtype)


def _down_backward_fake(
    dout, z, w2, b2, scores, row_token, row_slot, slot_row, expert_start, tiles, tile_height,
    activation, concatenated, need_dz, need_dw2, need_db2, need_dscores, wide, backend,
):  # fmt: skip
    likes = ((z, need_dz), (b2, need_db2), (scores, need_dscores))
    dz, db2, dscores = (torch.empty_like(t) if need else None for t, need in likes)
    return dz, _weight_gradient_fake(w2, wide) if need_dw2 else None, db2, dscores


def _down_backward_flops(
    dout, z, w2, b2, scores, row_token, row_slot, slot_row, expert_start, tiles, tile_height,
    activation, concatenated, need_dz, need_dw2, need_db2, need_dscores, wide, backend,
    out_shape=None,
):  # fmt: skip
    return 2 * z[0] * w2[1] * w2[2] * ((need_dz or need_dw2 or need_dscores) + need_dw2)


@operator(
    "down_backward(Tensor dout, Tensor z, Tensor w2, Tensor? b2, Tensor? scores, Tensor? row_token,"
    " Tensor? row_slot, Tensor? slot_row, Tensor expert_start, Tensor tiles, int tile_height,"
    " str activation, bool concatenated, bool need_dz, bool need_dw2, bool need_db2,"
    " bool need_dscores, bool wide, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_down_backward_fake,
    flops=_down_backward_flops,
)
def down_backward(
    dout, z, w2, b2, scores, row_token, row_slot, slot_row, expert_start, tiles, tile_height,
    activation, concatenated, need_dz, need_dw2, need_db2, need_dscores, wide, backend,
):  # fmt: skip
    """dZ, dW2, db2, dscores from dO: dO W2 is formed once, Y never, A again from Z.

    dW2 is fp32 if `wide`, with the strides of W2.
    """
    if backend == "torch":
        found = reference.down_backward(
            dout, z, w2, b2, scores, row_token, row_slot, expert_start,
            ActivationType(activation), concatenated,
        )  # fmt: skip
        needed = (need_dz, need_dw2, need_db2, need_dscores)
        dz, dw2, db2, dscores = (g if need else None for g, need in zip(found, needed, strict=True))
        return dz, _widened(dw2, wide), db2, dscores
    return _triton().down_backward(
        dout, z, w2, b2, scores, row_token, row_slot, slot_row, expert_start, tiles, tile_height,
        ActivationType(activation), concatenated, need_dz, need_dw2, need_db2, need_dscores,
        wide=wide,
    )  # fmt: skip


def _widened(gradient: torch.Tensor | None, wide: bool) -> torch.Tensor | None:
    return gradient.float() if wide and gradient is not None else gradient


def _down_backward_into_fake(main_grad, *args):
    *given, need_dz, need_db2, need_dscores, backend = args
    needs = (need_dz, False, need_db2, need_dscores)
    dz, _, db2, dscores = _down_backward_fake(*given, *needs, True, backend)
    return dz, db2, dscores


@operator(
    "down_backward_into(Tensor(a!) main_grad, Tensor dout, Tensor z, Tensor w2, Tensor? b2,"
    " Tensor? scores, Tensor? row_token, Tensor? row_slot, Tensor? slot_row, Tensor expert_start,"
    " Tensor tiles, int tile_height, str activation, bool concatenated, bool need_dz,"
    " bool need_db2, bool need_dscores, str backend) -> (Tensor, Tensor, Tensor)",
    fake=_down_backward_into_fake,
    flops=lambda main_grad, dout, z, w2, *_, out_shape=None: 4 * z[0] * w2[1] * w2[2],
)
def down_backward_into(
    main_grad, dout, z, w2, b2, scores, row_token, row_slot, slot_row, expert_start, tiles,
    tile_height, activation, concatenated, need_dz, need_db2, need_dscores, backend,
):  # fmt: skip
    """`down_backward` that adds dW2 to `main_grad`, fp32 with the strides of W2."""
    given = (
        dout, z, w2, b2, scores, row_token, row_slot, slot_row, expert_start, tiles, tile_height,
    )  # fmt: skip
    needs = (need_dz, True, need_db2, need_dscores)
    if backend == "torch":
        dz, dw2, db2, dscores = down_backward(
            *given, activation, concatenated, *needs, True, backend
        )
        main_grad.add_(dw2)
    else:
        dz, _, db2, dscores = _triton().down_backward(
            *given, ActivationType(activation), concatenated, *needs, main_grad=main_grad
        )
    return dz, db2, dscores


# --- backward of up -------------------------------------------------------------------------------
def _up_backward_fake(
    dz, x, w1, row_token, slot_row, token_start, expert_start, tiles, tile_height,
    need_dx, need_dw1, need_db1, wide, backend,
):  # fmt: skip
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else None
    dw1 = _weight_gradient_fake(w1, wide) if need_dw1 else None
    db1 = w1.new_empty(w1.shape[:2]) if need_db1 else None
    return dx, dw1, db1


def _up_backward_flops(
    dz, x, w1, row_token, slot_row, token_start, expert_start, tiles, tile_height,
    need_dx, need_dw1, need_db1, wide, backend, out_shape=None,
):  # fmt: skip
    return 2 * dz[0] * w1[1] * w1[2] * (need_dx + need_dw1)


@operator(
    "up_backward(Tensor dz, Tensor x, Tensor w1, Tensor? row_token, Tensor? slot_row,"
    " Tensor? token_start, Tensor expert_start, Tensor tiles, int tile_height, bool need_dx,"
    " bool need_dw1, bool need_db1, bool wide, str backend) -> (Tensor, Tensor, Tensor)",
    fake=_up_backward_fake,
    flops=_up_backward_flops,
)
def up_backward(
    dz, x, w1, row_token, slot_row, token_start, expert_start, tiles, tile_height,
    need_dx, need_dw1, need_db1, wide, backend,
):  # fmt: skip
    """dX = Σ dZ W1 over a token's rows, dW1 = dZᵀ X, in fp32 if `wide`, db1 = Σ dZ."""
    if backend == "torch":
        found = reference.up_backward(dz, x, w1, row_token, slot_row, token_start, expert_start)
        needed = (need_dx, need_dw1, need_db1)
        dx, dw1, db1 = (g if need else None for g, need in zip(found, needed, strict=True))
        return dx, _widened(dw1, wide), db1
    return _triton().up_backward(
        dz, x, w1, row_token, slot_row, token_start, expert_start, tiles, tile_height,
        need_dx, need_dw1, need_db1, wide=wide,
    )  # fmt: skip


def _up_backward_into_fake(main_grad, *args):
    *given, need_dx, need_db1, backend = args
    dx, _, db1 = _up_backward_fake(*given, need_dx, False, need_db1, True, backend)
    return dx, db1


def _up_backward_into_flops(main_grad, *args, out_shape=None):
    *given, need_dx, need_db1, backend = args
    return _up_backward_flops(*given, need_dx, True, need_db1, True, backend)


@operator(
    "up_backward_into(Tensor(a!) main_grad, Tensor dz, Tensor x, Tensor w1, Tensor? row_token,"
    " Tensor? slot_row, Tensor? token_start, Tensor expert_start, Tensor tiles, int tile_height,"
    " bool need_dx, bool need_db1, str backend) -> (Tensor, Tensor)",
    fake=_up_backward_into_fake,
    flops=_up_backward_into_flops,
)
def up_backward_into(
    main_grad, dz, x, w1, row_token, slot_row, token_start, expert_start, tiles, tile_height,
    need_dx, need_db1, backend,
):  # fmt: skip
    """`up_backward` that adds dW1 to `main_grad`, fp32 with the strides of W1."""
    given = (
        dz, x, w1, row_token, slot_row, token_start, expert_start, tiles, tile_height,
        need_dx, True, need_db1,
    )  # fmt: skip
    if backend == "torch":
        dx, dw1, db1 = up_backward(*given, True, backend)
        main_grad.add_(dw1)
    else:
        dx, _, db1 = _triton().up_backward(*given, main_grad=main_grad)
    return dx, db1
