"""Times of the layer under token rounding: with its router, without it, and the routing alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sonicmoe import experts, ops
from sonicmoe.enums import ActivationType
from sonicmoe.errors import bad_argument
from sonicmoe.layer.run import permute
from sonicmoe.routing import Router, Routing, TokenRounding, TopK, statistics
from sonicmoe.tools.candidates import Candidate, leaves_of
from sonicmoe.tools.cases import Case
from sonicmoe.tools.inputs import Inputs, make_inputs
from sonicmoe.tools.tables import table
from sonicmoe.tools.verify import Check, passed, verify
from sonicmoe.tools.verify_run import check_table
from sonicmoe.validation import resolve_backend

from .kernels import busy_ms
from .measure import times
from .timing import median_ms

ROUTINGS = {
    "top_k": None,
    "nr": "nr-f",
    "sr": "sr-f",
    "nr_s": "nr-s",
    "balance": "balance-f",
    "up": "up",
    "down": "down",
}


@dataclass(frozen=True, slots=True)
class Options:
    tile: int
    routing: str
    device: str
    dtype: torch.dtype
    gate_up: str = "interleaved"
    check: bool = True
    rep_ms: int = 200


def parse_shape(text: str, bias: bool = False) -> tuple[Case, int]:
    """The case and the tile of T,H,I,E,K,tileM. Scores are the softmax over all experts."""
    *shape, tile = text.split(",")
    if len(shape) != 5 or not tile.strip().isdigit() or int(tile) < 1:
        raise bad_argument(
            "shape", "six integers T,H,I,E,K,tileM", repr(text),
            "Write for example 16384,4096,1024,256,4,128.",
        )  # fmt: skip
    case = Case.of_shape(",".join(shape), ActivationType.SWIGLU, bias, "topk_over_softmax")
    return case, int(tile)


def bench_rounding(case: Case, options: Options) -> list[str]:
    """Verify and time one routing, print its table; returns a text for every failure."""
    inputs = make_inputs(case, "uniform", options.device, options.dtype)
    p, router = case.problem, make_router(case, options)
    with torch.no_grad():
        logits = torch.nn.functional.linear(inputs.x, inputs.router_w)
        fixed = router(logits)
    if options.check:
        failures = failures_of(inputs, router, fixed, options)
        if failures:
            return failures

    leaf = fixed.scores.detach().clone().requires_grad_()
    candidates = {
        "in": Candidate(options.routing, True, with_router(inputs, router, options),
                      leaves_of(inputs, router=True), inputs.dout),
        "out": _without_router(inputs, fixed, leaf, lambda: leaf, options),
    }  # fmt: skip
    rows = []
    for name, candidate in candidates.items():
        forward = median_ms(candidate.forward, options.device, options.rep_ms)
        both = median_ms(candidate.forward_backward, options.device, options.rep_ms)
        found = times(p, forward, both - forward)
        columns = ("fwd_ms", "bwd_ms", "fwd_bwd_ms", "fwd_tflops", "fwd_bwd_tflops")
        rows.append([options.routing, name, *(found[column] for column in columns)])
    alone = routing_alone(router, logits, options)
    by_clock = median_ms(alone, options.device, options.rep_ms)
    busy = busy_ms(alone, options.device)

    s = statistics(fixed, options.tile)
    print(f"\n{p}, tile {options.tile}, {options.dtype}{'' if options.check else ', NOT VERIFIED'}")
    head = ("routing", "router", "fwd ms", "bwd ms", "fwd+bwd ms", "fwd TFLOP/s", "TFLOP/s")
    print(table(head, rows))
    print(f"routing alone, logits to permutation: {by_clock:.4f} ms, busy {busy:.4f} ms")
    print(
        f"rows {int(s.rows.sum())} of {p.R}: {int(s.dropped)} dropped, {int(s.added)} added; "
        f"padding {s.padding_before.item():.1%} before, {s.padding_after.item():.1%} after"
    )
    return []


def make_router(case: Case, options: Options) -> Router:
    p, subroutine = case.problem, ROUTINGS[options.routing]
    if subroutine is None:
        return TopK(p.E, p.K, softmax_over_topk=False)
    return TokenRounding(p.E, p.K, tile=options.tile, subroutine=subroutine)


def _layer(i: Inputs, r: Routing, scores: torch.Tensor, options: Options) -> torch.Tensor:
    return experts(
        i.x, r.ids, scores, i.w1, i.w2, i.b1, i.b2,
        slot_token=r.slot_token, token_start=r.token_start, activation=i.case.activation,
        gate_up=options.gate_up,
    )  # fmt: skip


def with_router(i: Inputs, router: Router, options: Options) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        r = router(torch.nn.functional.linear(i.x, i.router_w))
        return _layer(i, r, r.scores, options)

    return forward


def _without_router(
    i: Inputs,
    r: Routing,
    leaf: torch.Tensor,
    scores: Callable[[], torch.Tensor],
    options: Options,
) -> Candidate:
    leaves = leaves_of(i, router=False) | {"scores": leaf}
    return Candidate(
        options.routing, False, lambda: _layer(i, r, scores(), options), leaves, i.dout,
        options.gate_up,
    )  # fmt: skip


def routing_alone(router: Router, logits: torch.Tensor, options: Options) -> Callable[[], object]:
    tokens, num_experts = logits.shape

    def alone() -> object:
        with torch.no_grad():
            r = router(logits)
            return permute(
                r.ids, num_experts, slot_token=r.slot_token, tokens=tokens,
                token_start=r.token_start, dtype=options.dtype,
            )  # fmt: skip

    return alone


# --- verification ---------------------------------------------------------------------------------
def failures_of(inputs: Inputs, router: Router, r: Routing, options: Options) -> list[str]:
    """The choice against plain PyTorch, then the layer and every gradient against fp64."""
    if isinstance(router, TokenRounding) and not _same_choice(router, r):
        return [f"{options.routing}: keeps other pairs than plain PyTorch"]
    checks = _layer_checks(inputs, r, options)
    return [] if passed(checks) else [f"{options.routing}:\n{check_table(checks)}"]


def _same_choice(router: TokenRounding, r: Routing) -> bool:
    """On given random numbers, since the two backends must draw the same."""
    uniform = torch.rand(router.num_experts, device=r.logits.device)
    stochastic = router.subroutine in ("sr-f", "nr-s")
    got = router(r.logits, uniform=uniform if stochastic else None)
    scores = _own_scores(r.logits, resolve_backend(None, r.logits))
    if not torch.allclose(scores, r.logits.float().softmax(-1), rtol=1.3e-6, atol=1e-5):
        return False
    _, ids = ops.topk(r.logits, router.k, True, "torch")
    want = ops.round_tokens(scores, ids, router.tile, router.subroutine, uniform, "torch")
    return torch.equal(got.ids, want[0]) and torch.equal(got.slot_token, want[1])


def _own_scores(logits: torch.Tensor, backend: str) -> torch.Tensor:
    """The softmax (T, E) that the router decides by: one an ulp away may decide otherwise.

    Where every expert is chosen and the tile is one row, every pair is kept.
    """
    every = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
    scores = ops.round_logits(logits, every.expand_as(logits), False, 1, "down", None, backend)[2]
    return scores.view_as(logits)


def _layer_checks(inputs: Inputs, r: Routing, options: Options) -> list[Check]:
    """The choice as (T, W), W the most experts of a token, which the checks know how to walk."""
    p = inputs.case.problem
    if r.slot_token is None or r.token_start is None:
        leaf = r.scores.detach().clone().requires_grad_()
        wide = replace(inputs, ids=r.ids, scores=leaf)
        return verify(_without_router(wide, r, leaf, lambda: leaf, options), wide)
    width = max(int(r.token_start.diff().max()), 1)
    used = r.ids >= 0
    token = torch.where(used, r.slot_token, 0).long()
    rank = torch.arange(len(token), device=token.device) - r.token_start[token]
    place = torch.where(used, token * width + rank, p.T * width)
    ids = r.ids.new_full((p.T * width + 1,), p.E).scatter_(0, place, torch.where(used, r.ids, p.E))
    scores = r.scores.new_zeros(p.T * width + 1).scatter_(0, place, r.scores.detach())
    leaf = scores[:-1].view(p.T, width).clone().requires_grad_()
    case = replace(inputs.case, problem=replace(p, K=width))
    wide = replace(inputs, case=case, ids=ids[:-1].view(p.T, width), scores=leaf)

    def pair_scores() -> torch.Tensor:
        return torch.nn.functional.pad(leaf.flatten(), (0, 1))[place]

    return verify(_without_router(wide, r, leaf, pair_scores, options), wide)
