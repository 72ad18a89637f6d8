"""Token rounding: top-K, changed so that every expert's rows fill whole tiles."""

import torch

from .. import ops
from ..errors import bad_argument, say_once
from ..layer.nodes import refuse_second_derivatives
from ..reference.token_rounding import STOCHASTIC, SUBROUTINES, spread_pairs
from ..shapes import check_size
from ..validation import (
    check_device,
    check_floating,
    check_integer,
    check_rank,
    check_shape,
    resolve_backend,
)
from .base import Router, Routing, at_least_fp32
from .scores import topk_scores


class TokenRounding(Router):
    """Softmax over all experts, top-K, then each expert's rows rounded to a multiple of `tile`.

    An expert that rounds down drops the chosen tokens with the smallest scores; one that rounds up
    adds the best tokens that had not chosen it. Every pair, added ones too, has its own softmax
    score. `normalize` divides the scores of a token by the sum of its K largest, so that in
    `eval()`, which is plain top-K, they sum to one. Nothing else is renormalized.

    subroutine  how an expert rounds: "nr-f" to the nearest multiple, "sr-f" and "nr-s" at random,
                by its rows or by their scores, "balance-f" so that the errors of the experts
                cancel, "up", "down". It rounds up only if there are enough tokens.
    generator   of the random numbers, on the device of the logits; None is torch's own, which CUDA
                graphs and `torch.compile` support. Numbers can also be passed to `forward`.
    """

    trusted = True

    def __init__(
        self,
        num_experts: int,
        k: int,
        *,
        tile: int = 128,
        subroutine: str = "nr-f",
        normalize: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_experts, k)
        _check_rounding(tile, subroutine)
        self.tile = tile
        self.subroutine = subroutine
        self.normalize = normalize
        self.generator = generator

    def forward(
        self,
        logits: torch.Tensor,
        *,
        uniform: torch.Tensor | None = None,
        backend: str | None = None,
    ) -> Routing:
        """`uniform` (E,) in [0, 1): the random numbers of this call, for "sr-f" and "nr-s"."""
        self.check(logits)
        if not self.training:
            scores, ids = topk_scores(
                logits, self.k, softmax_over_topk=False, renormalize=self.normalize, backend=backend
            )
            return Routing(logits, ids, scores)
        _warn_of_few_tokens(logits.shape[0], self.tile)
        backend = resolve_backend(backend, logits)
        with torch.no_grad():
            _, ids = ops.topk(logits, self.k, True, backend)
        if uniform is None and self.subroutine in STOCHASTIC:
            uniform = torch.rand(self.num_experts, device=logits.device, generator=self.generator)
        uniform = _checked_uniform(uniform, self.subroutine, logits)
        score, expert, token, token_start, _, chosen = _RoundLogits.apply(
            logits, ids, self.normalize, self.tile, self.subroutine, uniform, backend
        )
        return Routing(logits, expert, score, token, token_start, chosen)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tile={self.tile}, subroutine={self.subroutine}"


def round_tokens(
    scores: torch.Tensor,
    ids: torch.Tensor,
    *,
    tile: int = 128,
    subroutine: str = "nr-f",
    uniform: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Apply token rounding to a choice ids (T, K), with any scores (T, E) ≥ 0 as preferences.

    Returns the pairs that are kept, ordered by token and then by expert, and the rows of experts:
    scores (S,), differentiable; experts (S,), −1 where unused; tokens (S,), T where unused;
    token_start (T+1,); rows (E,) after rounding and (E,) before it. S is T·K and what rounding up
    can add, at most E·(tile − 1), so no size depends on values. Ties go to the lower token.
    """
    check_rank("scores", scores, "(T, E)")
    check_floating("scores", scores)
    check_rank("ids", ids, "(T, K)")
    check_integer("ids", ids)
    check_device("ids", ids, scores)
    if ids.shape[0] != scores.shape[0] or not 1 <= ids.shape[1] <= scores.shape[1]:
        raise bad_argument(
            "ids",
            f"(T, K) for scores (T, E) = {tuple(scores.shape)}, K ≤ E",
            tuple(ids.shape),
            "Take the K largest scores of each token.",
        )
    _check_rounding(tile, subroutine)
    _warn_of_few_tokens(scores.shape[0], tile)
    uniform = _checked_uniform(uniform, subroutine, scores)
    backend = resolve_backend(backend, scores)
    return _RoundTokens.apply(at_least_fp32(scores), ids, tile, subroutine, uniform, backend)


def _check_rounding(tile: int, subroutine: str) -> None:
    check_size("tile", tile)
    if subroutine not in SUBROUTINES:
        raise bad_argument(
            "subroutine", f"one of {', '.join(SUBROUTINES)}", repr(subroutine), "Default: nr-f."
        )


def _warn_of_few_tokens(tokens: int, tile: int) -> None:
    if not torch.compiler.is_compiling() and 0 < tokens < tile:
        say_once(
            f"token rounding of fewer tokens than its tile of {tile} drops every token, since no"
            " expert can fill a tile: pass more tokens at once or a smaller tile"
        )


def _checked_uniform(
    uniform: torch.Tensor | None, subroutine: str, scores: torch.Tensor
) -> torch.Tensor | None:
    if subroutine in STOCHASTIC:
        if uniform is None:
            raise bad_argument(
                "uniform",
                f"(E,) random numbers in [0, 1) for {subroutine!r}",
                None,
                "Pass torch.rand(E, device=scores.device).",
            )
        check_shape("uniform", uniform, (scores.shape[1],), "(E,)")
        check_floating("uniform", uniform)
        check_device("uniform", uniform, scores)
        return uniform.float()
    if uniform is not None:
        raise bad_argument(
            "uniform", f"None for {subroutine!r}, which is not random", "a tensor", "Omit it."
        )
    return None


class _RoundTokens(torch.autograd.Function):
    """Only the scores of the kept pairs are differentiable. Kept: the pairs, 8·S bytes."""

    @staticmethod
    def forward(ctx, scores, ids, tile, subroutine, uniform, backend):
        ctx.set_materialize_grads(False)
        expert, token, score, token_start, rows, chosen = ops.round_tokens(
            scores, ids, tile, subroutine, uniform, backend
        )
        ctx.mark_non_differentiable(expert, token, token_start, rows, chosen)
        ctx.save_for_backward(expert, token)
        ctx.shape = scores.shape
        return score, expert, token, token_start, rows, chosen

    @staticmethod
    def backward(ctx, dscore, *_):
        refuse_second_derivatives()
        if dscore is None:
            return (None,) * 6
        expert, token = ctx.saved_tensors
        return spread_pairs(dscore, expert, token, ctx.shape), None, None, None, None, None


class _RoundLogits(torch.autograd.Function):
    """The same from logits. Kept: the logits; the pairs, 4·S + 4·T bytes; with `normalize` the
    choice, 4·T·K bytes.
    """

    @staticmethod
    def forward(ctx, logits, ids, normalize, tile, subroutine, uniform, backend):
        ctx.set_materialize_grads(False)
        expert, token, score, token_start, rows, chosen = ops.round_logits(
            logits, ids, normalize, tile, subroutine, uniform, backend
        )
        ctx.mark_non_differentiable(expert, token, token_start, rows, chosen)
        ctx.save_for_backward(logits, ids if normalize else None, expert, token_start)
        ctx.backend = backend
        return score, expert, token, token_start, rows, chosen

    @staticmethod
    def backward(ctx, dscore, *_):
        refuse_second_derivatives()
        if dscore is None:
            return (None,) * 7
        dlogits = ops.round_logits_backward(dscore, *ctx.saved_tensors, ctx.backend)
        return dlogits, None, None, None, None, None, None
