"""Operators of the products with an adapter: a second product U Bᵀ of low rank in the first.

U (R, r), contiguous, has a row for each routed row, `factor` is B (E, N, r), best stored like the
weights beside it. The rest as in `products`.
"""

from functools import cache

import torch
from torch.nn import functional as F

from ..enums import ActivationType
from ..reference import products as reference
from ..reference.activation import activate, activate_backward
from .grouped_gemm import _intermediate_size
from .register import operator


@cache
def _triton():
    from ..launch import lora

    return lora


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


# --- up -------------------------------------------------------------------------------------------
def _adapted_up_fake(x, w1, b1, u, *args):
    *_, activation, _concatenated, _backend = args
    rows, n = u.shape[0], w1.shape[1]
    return x.new_empty(rows, n), x.new_empty(rows, _intermediate_size(n, activation))


@operator(
    "adapted_up(Tensor x, Tensor w1, Tensor? b1, Tensor u, Tensor factor, Tensor row_token,"
    " Tensor expert_start, Tensor tiles, int tile_height, str activation, bool concatenated,"
    " str backend) -> (Tensor, Tensor)",
    fake=_adapted_up_fake,
    flops=lambda x, w1, b1, u, *_, out_shape=None: 2 * u[0] * w1[1] * (w1[2] + u[1]),
)
def adapted_up(
    x, w1, b1, u, factor, row_token, expert_start, tiles, tile_height,
    activation, concatenated, backend,
):  # fmt: skip
    """Z = X W1ᵀ + U Bᵀ + b1 and A = act(Z), rows of X gathered on the fly."""
    act = ActivationType(activation)
    if backend == "torch":
        rows = u.shape[0]
        z = reference.up(x, w1, b1, row_token, expert_start, rows, act, concatenated)[0]
        z += reference.down(u, factor, None, None, expert_start)
        return z, activate(_wide(z), act, concatenated).to(x.dtype)
    return _triton().up(x, w1, b1, u, factor, row_token, tiles, act, concatenated)


# --- rows that lie in order -----------------------------------------------------------------------
@operator(
    "adapted_product(Tensor a, Tensor w, Tensor? bias, Tensor u, Tensor factor,"
    " Tensor expert_start, Tensor tiles, int tile_height, str kernel, str backend) -> Tensor",
    fake=lambda a, w, *_: a.new_empty(a.shape[0], w.shape[1]),
    flops=lambda a, w, bias, u, *_, out_shape=None: 2 * a[0] * w[1] * (w[2] + u[1]),
)
def adapted_product(a, w, bias, u, factor, expert_start, tiles, tile_height, kernel, backend):
    """Y = A Wᵀ + U Bᵀ + bias, 'down' or 'dx'; rows past the last expert are not to be trusted."""
    if backend == "torch":
        y = reference.down(a, w, bias, None, expert_start)
        return y.add_(reference.down(u, factor, None, None, expert_start))
    return _triton().product(kernel, a, w, bias, u, factor, tiles)


# --- backward of down and aggregation -------------------------------------------------------------
def _adapted_down_backward_fake(dout, z, w2, b2, u, factor, scores, *_):
    return torch.empty_like(z), z.new_empty(z.shape[0], w2.shape[2]), torch.empty_like(scores)


@operator(
    "adapted_down_backward(Tensor dout, Tensor z, Tensor w2, Tensor? b2, Tensor u, Tensor factor,"
    " Tensor scores, Tensor row_token, Tensor row_slot, Tensor slot_row, Tensor expert_start,"
    " Tensor tiles, int tile_height, str activation, bool concatenated, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_adapted_down_backward_fake,
    flops=lambda dout, z, w2, b2, u, *_, out_shape=None: 2 * z[0] * w2[2] * (w2[1] + u[1]),
)
def adapted_down_backward(
    dout, z, w2, b2, u, factor, scores, row_token, row_slot, slot_row, expert_start, tiles,
    tile_height, activation, concatenated, backend,
):  # fmt: skip
    """dZ, A' = score · A and dscores, from dA' = dO W2 + U Bᵀ."""
    act = ActivationType(activation)
    if backend == "torch":
        return _down_backward_reference(
            dout, z, w2, b2, u, factor, scores, row_token, row_slot, slot_row, expert_start,
            act, concatenated,
        )  # fmt: skip
    return _triton().down_backward(
        dout, z, w2, b2, u, factor, scores, row_token, row_slot, slot_row, expert_start, tiles,
        tile_height, act, concatenated,
    )  # fmt: skip


def _down_backward_reference(
    dout, z, w2, b2, u, factor, scores, row_token, row_slot, slot_row, expert_start,
    activation, concatenated,
):  # fmt: skip
    def gathered(w):
        relu = ActivationType.RELU
        return reference.up(dout, w, None, row_token, expert_start, len(z), relu, False)[0]

    da = _wide(gathered(w2.mT).add_(reference.down(u, factor, None, None, expert_start)))
    a = activate(_wide(z), activation, concatenated)
    dscore = (da * a).sum(-1)
    if b2 is not None:
        dscore += gathered(b2[:, None])[:, 0]
    dscores = F.pad(dscore, (0, 1))[slot_row.long()].view_as(scores)  # -1: the zero behind
    score = scores.flatten()[row_slot.clamp(0, scores.numel() - 1).long()][:, None]
    dz = activate_backward(_wide(z), score * da, activation, concatenated)
    return dz.to(z.dtype), (score * a).to(z.dtype), dscores.to(scores.dtype)


# --- factors --------------------------------------------------------------------------------------
@operator(
    "transposed(Tensor t, float scale, ScalarType dtype, str backend) -> Tensor",
    fake=lambda t, scale, dtype, backend: t.new_empty(t.shape[::-1], dtype=dtype),
)
def transposed(t, scale, dtype, backend):
    """scale · tᵀ of a contiguous matrix, rounded once; PyTorch's own takes 15 times a copy's."""
    if backend == "torch":
        return (_wide(t.t()) * scale).to(dtype).contiguous()
    return _triton().transposed(t, scale, dtype)
