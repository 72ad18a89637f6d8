"""The grouped products and the aggregation, forward and backward, one expert at a time."""

from collections.abc import Iterator

import torch

from ..enums import ActivationType
from .activation import activate, activate_backward


def _expert_rows(expert_start: torch.Tensor) -> Iterator[tuple[int, slice]]:
    start = expert_start.tolist()
    for e in range(len(start) - 1):
        if start[e] < start[e + 1]:
            yield e, slice(start[e], start[e + 1])


def _wide(t: torch.Tensor) -> torch.Tensor:
    """The dtype elementwise arithmetic runs in: fp32, or fp64 where the data is."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _rows_of(x: torch.Tensor, row_token: torch.Tensor | None, rows: slice) -> torch.Tensor:
    return x[rows] if row_token is None else x[row_token[rows].long()]


def _scores_of(
    scores: torch.Tensor | None, row_slot: torch.Tensor | None, rows: slice
) -> torch.Tensor | None:
    if scores is None:
        return None
    return (scores[rows] if row_slot is None else scores.flatten()[row_slot[rows].long()])[:, None]


def up(x, w1, b1, row_token, expert_start, rows: int, activation: ActivationType, concatenated):
    """Z and A of every row: (R, N) and (R, I). Rows past the last expert are zero."""
    z = x.new_zeros(rows, w1.shape[1])
    for e, r in _expert_rows(expert_start):
        z[r] = torch.nn.functional.linear(
            _rows_of(x, row_token, r), w1[e], None if b1 is None else b1[e]
        )
    return z, activate(_wide(z), activation, concatenated).to(x.dtype)


def down(a, w2, b2, row_scores, expert_start):
    """Y of every row: (R, H), multiplied by the row's score where scores are given."""
    y = a.new_zeros(a.shape[0], w2.shape[1])
    for e, r in _expert_rows(expert_start):
        out = torch.nn.functional.linear(a[r], w2[e], None if b2 is None else b2[e])
        y[r] = out if row_scores is None else (_wide(out) * row_scores[r, None]).to(a.dtype)
    return y


def aggregate(y, scores, slot_row, token_start, tokens: int):
    """O_t = Σ over the slots of t of score · Y[row of the slot]; absent slots add nothing."""
    slots = slot_row.numel()
    here = slot_row >= 0
    if token_start is None:
        token = torch.arange(tokens, device=y.device).repeat_interleave(slots // max(tokens, 1))
    else:
        token = torch.searchsorted(
            token_start, torch.arange(slots, device=y.device, dtype=token_start.dtype), right=True
        ).sub_(1)
    picked = _wide(y[slot_row[here].long()])
    if scores is not None:
        picked = picked * scores.flatten()[here][:, None]
    out = picked.new_zeros(tokens, y.shape[1])
    return out.index_add_(0, token[here], picked).to(y.dtype)


def down_backward(
    dout, z, w2, b2, scores, row_token, row_slot, expert_start, activation, concatenated
):
    """dZ, dW2, db2 and the score gradient from dO, without Y: dS = ⟨dA', A⟩ over I."""
    dz, dw2 = torch.zeros_like(z), torch.zeros_like(w2)
    db2 = None if b2 is None else torch.zeros_like(b2)
    dscores = None if scores is None else torch.zeros_like(scores).flatten()
    for e, r in _expert_rows(expert_start):
        do, s = _rows_of(dout, row_token, r), _scores_of(scores, row_slot, r)
        zw = _wide(z[r])
        a = activate(zw, activation, concatenated)
        da = _wide(do @ w2[e])
        if dscores is not None:
            ds = (da * a).sum(-1)
            if b2 is not None:
                ds += (_wide(do) * b2[e]).sum(-1)
            dscores[r if row_slot is None else row_slot[r].long()] = ds.to(dscores.dtype)
            da, a = da * s, a * s
        dz[r] = activate_backward(zw, da, activation, concatenated).to(z.dtype)
        dw2[e] = do.mT @ a.to(z.dtype)
        if db2 is not None:
            db2[e] = (_wide(do) if s is None else _wide(do) * s).sum(0).to(db2.dtype)
    return dz, dw2, db2, None if dscores is None else dscores.view_as(scores)


def up_backward(dz, x, w1, row_token, slot_row, token_start, expert_start):
    """dX (aggregated over the rows of a token where rows were gathered), dW1, db1."""
    dx_rows, dw1 = dz.new_zeros(dz.shape[0], x.shape[1]), torch.zeros_like(w1)
    db1 = w1.new_zeros(w1.shape[0], w1.shape[1])
    for e, r in _expert_rows(expert_start):
        dx_rows[r] = dz[r] @ w1[e]
        dw1[e] = dz[r].mT @ _rows_of(x, row_token, r)
        db1[e] = _wide(dz[r]).sum(0).to(db1.dtype)
    if row_token is None:
        return dx_rows, dw1, db1
    return aggregate(dx_rows, None, slot_row, token_start, x.shape[0]), dw1, db1
