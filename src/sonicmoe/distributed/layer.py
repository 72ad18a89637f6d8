"""`experts` over a process group: dispatch, the local experts, combine.

Scores travel with the rows and are applied beside the experts, so a token's rows are summed where
they were computed: one row comes back from a rank, and neither side keeps Y.
"""

from typing import NamedTuple, Unpack

import torch
import torch.distributed as dist

from .. import ops
from ..layer import prepare
from ..layer.lora import LowRank
from ..layer.main_grad import with_main_grad
from ..layer.nodes import refuse_second_derivatives
from ..layer.options import OptionArguments, Options
from ..layer.run import run
from ..layer.weights import ExpertWeights, Projection
from ..packed import PackedWeight
from ..shapes import check_size
from ..validation import (
    check_rank,
    check_slots,
    resolve_backend,
)
from .agreement import Settings, raise_on_all_ranks
from .plan import Plan, make_plan


class Arrived(NamedTuple):
    """Result of `dispatch`: the rows (R, H) that this rank received and their (row, expert) pairs.

    pair_row (ascending), ids (of local experts) and scores have one entry per pair.
    """

    rows: torch.Tensor
    pair_row: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    w1: torch.Tensor | PackedWeight,
    w2: torch.Tensor | PackedWeight,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    slot_token: torch.Tensor | None = None,
    token_start: torch.Tensor | None = None,
    **options: Unpack[OptionArguments],
) -> torch.Tensor:
    """`sonicmoe.experts` with the experts spread evenly over the ranks of `group`.

    x, ids and scores belong to this rank's own tokens, any number of them. ids number the experts
    of the whole group; ids outside that range are dropped. Weights and biases are those of this
    rank's E experts, which are r·E to (r+1)·E−1 on rank r; their gradients sum over the tokens of
    all ranks. Every rank must call it, and must run the backward pass if one does. `group=None`
    means all ranks.

    If the ranks differ in anything but their tokens, all raise the same ValueError. A bad argument
    on one rank raises on all.
    """
    with raise_on_all_ranks(group, w1, x, ids):
        checked = Options.of(options)
        if checked.fp8_weights is not None:
            checked.fp8_weights.raise_if_stale()  # before one rank alone would
        (x,) = prepare.autocast(x)  # before x travels
        weights = ExpertWeights(Projection(w1, b1), Projection(w2, b2))
        prepare.check(x, weights, checked)
        ids, scores, token_start = check_slots(x, ids, scores, slot_token, token_start)
        for w in (w1, w2):
            with_main_grad(w)  # raises if the buffer does not fit
        adapters = _adapters(checked.lora1, checked.lora2)
        settings = _settings(x, scores, w1.shape[0])._replace(
            output_requires_grad=_needs_gradient(x, scores, w1, w2, b1, b2, *adapters),
            intermediate_size=w2.shape[2],
            activation=checked.activation,
            gate_up=checked.gate_up,
            has_b1=b1 is not None,
            has_b2=b2 is not None,
            precision=checked.precision,
        )
    arrived, plan = _dispatch(x, ids, scores, settings, group, slot_token, token_start)
    rows, pair_row, ids, scores = arrived
    y = run(prepare.routed(rows, ids, scores, weights, checked, slot_token=pair_row))
    return combine(y, plan)


def dispatch(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    experts_per_rank: int,
    group: dist.ProcessGroup | None = None,
    *,
    slot_token: torch.Tensor | None = None,
    token_start: torch.Tensor | None = None,
) -> tuple[Arrived, Plan]:
    """Send each token of x (T, H) to the ranks that hold its experts ids (T, K), with its scores.

    A token is sent to a rank once, however many of its experts are there. Differentiable in x and
    scores. Expert e is on rank e // experts_per_rank with local id e % experts_per_rank.
    `slot_token` and `token_start` as in `sonicmoe.experts`. Raises on every rank if one has a bad
    argument, or a different number of experts, hidden size or dtype.
    """
    with raise_on_all_ranks(group, x, ids):
        check_rank("x", x, "(T, H)")
        check_size("experts_per_rank", experts_per_rank)
        ids, scores, token_start = check_slots(x, ids, scores, slot_token, token_start)
        settings = _settings(x, scores, experts_per_rank)
    return _dispatch(x, ids, scores, settings, group, slot_token, token_start)


def _settings(x: torch.Tensor, scores: torch.Tensor, experts_per_rank: int) -> Settings:
    needs = _needs_gradient(x), _needs_gradient(scores)
    return Settings(experts_per_rank, x.shape[1], x.dtype, scores.dtype, *needs)


def _adapters(*adapters: LowRank | None) -> list[torch.Tensor]:
    return [t for lora in adapters if lora is not None for t in (lora.a, lora.b)]


def _needs_gradient(*tensors: torch.Tensor | PackedWeight | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _dispatch(x, ids, scores, settings, group, slot_token, token_start) -> tuple[Arrived, Plan]:
    plan = make_plan(ids, x.shape[0], settings, group, slot_token, token_start)
    rows, pair_scores = _Dispatch.apply(x, scores, plan)
    local_ids = ids.flatten()[plan.pair_slot] % settings.experts_per_rank
    pairs = torch.stack([plan.pair_row, local_ids], dim=1).to(torch.int32)
    pair_row, local_ids = plan.pairs.forth(pairs).unbind(1)
    # A pair counts rows from its sender's first; here they stand behind those of earlier senders.
    rows_from, pairs_from = plan.coming.unbind(1)
    row_start = rows_from.cumsum(0) - rows_from
    row_start = row_start.repeat_interleave(pairs_from, output_size=len(pair_row))
    pair_row = (pair_row + row_start).to(torch.int32)
    return Arrived(rows, pair_row, local_ids.contiguous(), pair_scores), plan


def combine(y: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Send y, one row for each received row, back to its rank and sum the rows of each token."""
    return _Combine.apply(y, plan)


def _sum_by_token(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    backend = resolve_backend(None, rows)
    return ops.combine(rows, None, plan.slot_row, plan.token_start, plan.tokens, backend)


class _Dispatch(torch.autograd.Function):
    """x, scores → the rows and pair scores that arrive. Kept: the maps of the plan.

    One node for both: ranks cannot disagree about the order of the exchanges on the way back.
    """

    @staticmethod
    def forward(ctx, x, scores, plan):
        ctx.plan = plan
        rows = plan.rows.forth(x.index_select(0, plan.row_token))
        ctx.shape = scores.shape
        return rows, plan.pairs.forth(scores.flatten()[plan.pair_slot])

    @staticmethod
    def backward(ctx, drows, dpair_scores):
        refuse_second_derivatives()
        plan, dx, dscores = ctx.plan, None, None
        if ctx.needs_input_grad[0]:
            dx = _sum_by_token(plan.rows.back(drows), plan)
        if ctx.needs_input_grad[1]:
            returned = torch.nn.functional.pad(plan.pairs.back(dpair_scores), (0, 1))
            dscores = returned[plan.slot_pair].view(ctx.shape)  # -1 is the zero at the end
        return dx, dscores, None


class _Combine(torch.autograd.Function):
    """The transpose of `_Dispatch`: back, sum; in the backward pass repeat, forth."""

    @staticmethod
    def forward(ctx, y, plan):
        ctx.plan = plan
        return _sum_by_token(plan.rows.back(y), plan)

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivatives()
        plan = ctx.plan
        return plan.rows.forth(dout.index_select(0, plan.row_token)), None
