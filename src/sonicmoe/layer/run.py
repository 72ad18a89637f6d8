"""The statements of the layer: permute → up → down → combine.

`MoE`, `experts`, `grouped_experts`, expert parallelism, transformers and PEFT all come through
here.
"""

from typing import Any, NamedTuple

import torch

from .. import ops
from ..errors import bad_argument
from ..ops.kinds import How, Source, kind_of
from ..tensors import Linear, Permutation
from ..tuning import tile_m
from ..validation import check_num_experts, resolve_backend
from .checkpoint import deferred_output, finish
from .nodes import Down, DownGiven, Shape, Up, UpGiven
from .options import Options
from .weights import ExpertWeights


class Call(NamedTuple):
    """The experts on the rows of one permutation, checked and ready to run.

    scores (T, K), (S,) or, for sorted rows, (R,) or None.
    """

    x: torch.Tensor
    scores: torch.Tensor | None
    weights: ExpertWeights
    p: Permutation
    options: Options
    backend: str
    step: Any = None  # kept alive while its kernels may be missing, see `precompile`

    @property
    def counts(self) -> torch.Tensor:
        """Rows of each expert (E,)."""
        assert self.p.counts is not None  # only rows that arrive sorted have none
        return self.p.counts

    def how(self) -> How:
        """Nothing is kept where no backward pass can follow."""
        x, scores, weights, _, options, backend, _ = self
        can_follow = torch.is_grad_enabled() and (
            x.requires_grad
            or (scores is not None and scores.requires_grad)
            or weights.need_gradient()
        )
        memory = options.memory
        return How(
            options.precision,
            options.activation,
            options.gate_up,
            can_follow,
            memory.z_dtype(x.dtype) if can_follow else None,
            can_follow and memory.recompute,
            can_follow and memory.keeps_transposes,
            memory.slices,
            backend,
        )


def run(call: Call) -> torch.Tensor:
    """The output (T, H), or (R, H) for sorted rows."""
    x, scores, weights, p = call[:4]
    how = call.how()
    kind = kind_of(how.precision)
    up, down = weights.up, weights.down
    with torch.no_grad():
        w1, w2 = kind.weights(up.weight, down.weight, x, how, call.options.fp8_weights)
        found = ops.up(x, Linear(w1, *up[1:]), down.lora_a, p, how)
    source, deferred = None, deferred_output()
    if how.recompute:
        source = Source(x, Linear(kind.kept_weight(w1, how), *up[1:]), found.u1)
    dz = Up.apply(x, up.weight.dense, *up[1:], UpGiven(w1, found.u1, p, how))
    shape = Shape(x.shape[0], x.dtype)
    given = DownGiven(w2, found.rows, found.kept, source, found.u2, p, shape, how, deferred)
    out = Down.apply(scores, down.weight.dense, *down[1:], given, *dz)
    return finish(out, deferred)


def permute(
    ids: torch.Tensor,
    num_experts: int,
    *,
    slot_token: torch.Tensor | None = None,
    tokens: int | None = None,
    token_start: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> Permutation:
    """Sort the (token, expert) pairs by expert, on the device.

    ids (T, K), or (S,) with `slot_token` (S,) ascending, the number of `tokens` and, where it is
    known, `token_start` (T+1,).
    """
    backend = resolve_backend(backend, ids)
    check_num_experts(num_experts)
    m = tile_m(dtype.itemsize)
    row_token, row_slot, slot_row, counts, expert_start, tiles = ops.permute(
        ids, num_experts, slot_token, m, backend
    )
    if slot_token is not None and token_start is None:
        if tokens is None:
            raise bad_argument("tokens", "the number of tokens", tokens, "slot_token needs it.")
        every = torch.arange(tokens + 1, device=ids.device, dtype=slot_token.dtype)
        token_start = torch.searchsorted(slot_token, every, out_int32=True)
    if token_start is not None:
        token_start = token_start.contiguous()
    return Permutation(row_token, row_slot, slot_row, token_start, counts, expert_start, tiles, m)


def sorted_rows(rows: torch.Tensor, expert_start: torch.Tensor, backend: str) -> Permutation:
    """The permutation of rows that arrive sorted: those of expert e are [start[e], start[e+1])."""
    m = tile_m(rows.dtype.itemsize)
    expert_start, tiles = ops.tiles(expert_start, rows.shape[0], m, backend)
    return Permutation.of_sorted_rows(expert_start, tiles, m)
