"""Every guarantee of token rounding, and each subroutine against the rule written the long way."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from score_matrices import SCORES, kept_pairs, top

from sonicmoe import errors
from sonicmoe.reference.routers import rounded_rows
from sonicmoe.reference.token_rounding import (
    STOCHASTIC,
    SUBROUTINES,
    most_rows,
    softmax_scores,
)
from sonicmoe.routing import TokenRounding, round_tokens

few = settings(max_examples=100)


@st.composite
def problems(draw, whole_tiles=False):
    """scores (T, E), ids (T, K), the tile, and a random number for each expert."""
    experts = draw(st.integers(1, 7))
    k = draw(st.integers(1, experts))
    tile = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16]))
    tokens = tile * draw(st.integers(0, 6)) if whole_tiles else draw(st.integers(0, 50))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = SCORES[draw(st.sampled_from(sorted(SCORES)))](tokens, experts, seed)
    return scores, top(scores, k), tile, torch.rand(experts, generator=seed)


def rounded(scores, ids, tile, subroutine, uniform):
    """(T, E) bool kept, (E,) rows and (E,) rows of the choice."""
    uniform = uniform if subroutine in STOCHASTIC else None
    score, expert, token, start, rows, chosen = round_tokens(
        scores, ids, tile=tile, subroutine=subroutine, uniform=uniform
    )
    tokens, experts = scores.shape
    kept = kept_pairs(expert, token, tokens, experts)
    used = int(rows.sum())
    # The list is what the layer asks for: by token, then by expert, its tail unused.
    assert len(expert) == most_rows(tokens, experts, ids.shape[1], tile, subroutine)
    assert len(expert) <= tokens * ids.shape[1] + experts * (tile - 1)
    assert (expert[used:] == -1).all() and (token[used:] == tokens).all()
    assert (score[used:] == 0).all()
    pairs = kept.nonzero()
    assert torch.equal(torch.stack([token[:used], expert[:used]], 1).long(), pairs)
    assert torch.equal(score[:used], scores[pairs[:, 0], pairs[:, 1]])
    assert torch.equal(start.long().diff(), kept.sum(1)) and start[0] == 0
    assert torch.equal(kept.sum(0), rows.long())
    assert torch.equal(chosen.long(), ids.flatten().long().bincount(minlength=experts))
    return kept, rows.long(), chosen.long()


@few
@given(problems(), st.sampled_from(SUBROUTINES))
def test_is_the_rule_written_the_long_way(problem, subroutine):
    scores, ids, tile, uniform = problem
    kept, rows, _ = rounded(scores, ids, tile, subroutine, uniform)
    want_rows, want = rounded_rows(scores, ids, tile, subroutine, uniform.tolist())
    assert rows.tolist() == want_rows
    assert torch.equal(kept, want)


@few
@given(problems(), st.sampled_from(SUBROUTINES))
def test_whole_tiles_and_less_than_one_of_change(problem, subroutine):
    scores, ids, tile, uniform = problem
    _, rows, chosen = rounded(scores, ids, tile, subroutine, uniform)
    assert (rows % tile == 0).all()
    assert ((rows - chosen).abs() < tile).all()
    assert (rows <= len(scores)).all()


@few
@given(problems(), st.sampled_from(SUBROUTINES))
def test_only_the_last_tile_differs_from_top_k(problem, subroutine):
    """An expert drops only its least preferred tokens, or only adds, and then the best."""
    scores, ids, tile, uniform = problem
    kept, rows, chosen = rounded(scores, ids, tile, subroutine, uniform)
    choice = torch.zeros_like(kept).scatter_(1, ids.long(), True)
    for e in range(scores.shape[1]):
        column, mine, chose = scores[:, e], kept[:, e], choice[:, e]
        if rows[e] >= chosen[e]:
            assert mine[chose].all()
            inside, outside = column[mine & ~chose], column[~mine]
        else:
            assert not mine[~chose].any()
            inside, outside = column[mine], column[chose & ~mine]
        if len(inside) and len(outside):
            assert inside.min() >= outside.max()
        whole = int(chosen[e]) // tile * tile
        first = sorted(chose.nonzero()[:, 0].tolist(), key=lambda t: (-column[t], t))[:whole]
        assert mine[first].all()


@few
@given(problems(), st.sampled_from(SUBROUTINES))
def test_ties_go_to_the_lower_token(problem, subroutine):
    scores, ids, tile, uniform = problem
    kept, _, _ = rounded(scores, ids, tile, subroutine, uniform)
    choice = torch.zeros_like(kept).scatter_(1, ids.long(), True)
    for e in range(scores.shape[1]):
        for t in range(1, len(scores)):
            before = (scores[:t, e] == scores[t, e]) & (choice[:t, e] == choice[t, e])
            assert not kept[t, e] or kept[:t, e][before].all()


@few
@given(problems(), st.sampled_from(SUBROUTINES))
def test_a_tile_of_one_row_is_top_k(problem, subroutine):
    scores, ids, _, uniform = problem
    kept, _, _ = rounded(scores, ids, 1, subroutine, uniform)
    assert torch.equal(kept, torch.zeros_like(kept).scatter_(1, ids.long(), True))


@few
@given(problems(whole_tiles=True))
def test_balance_keeps_the_total_within_half_a_tile(problem):
    scores, ids, tile, uniform = problem
    _, rows, chosen = rounded(scores, ids, tile, "balance-f", uniform)
    assert 2 * abs(int((rows - chosen).sum())) <= tile


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.sampled_from([1, 2, 5, 8]))
def test_balance_walks_over_the_experts(counts, tile):
    """One expert for each token, so that any counts can be had; tokens to fill up are enough."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).unsqueeze(1)
    spare = tile * len(counts)  # tokens of an expert that is a whole number of tiles
    ids = torch.cat([ids, torch.full((spare, 1), len(counts))]).int()
    scores = torch.rand(len(ids), len(counts) + 1)
    _, rows, _ = rounded(scores, ids, tile, "balance-f", torch.rand(len(counts) + 1))
    error, want = 0, []
    for f in [*counts, spare]:
        down, up = f // tile * tile, -(-f // tile) * tile
        want.append(up if abs(up - f + error) < abs(down - f + error) else down)
        error += want[-1] - f
        assert 2 * abs(error) <= tile
    assert rows.tolist() == want


def test_balance_can_move_an_expert_by_almost_a_tile():
    ids = torch.tensor([0] * 68 + [1] * 68).unsqueeze(1).int()
    _, rows, _ = rounded(torch.rand(136, 2), ids, 128, "balance-f", torch.rand(2))
    assert rows.tolist() == [128, 0]


@pytest.mark.parametrize("subroutine", SUBROUTINES)
def test_deterministic(subroutine):
    scores = SCORES["tied"](200, 6, torch.Generator().manual_seed(0))
    ids, uniform = top(scores, 2), torch.rand(6)
    first, second = (rounded(scores, ids, 16, subroutine, uniform)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("subroutine", STOCHASTIC)
def test_random_subroutines_follow_their_probability(subroutine):
    """Expert 0 has 3 of 8 rows over: up in 3/8 of the cases, or by the share of their scores."""
    scores = torch.zeros(16, 2)
    scores[:, 1] = 0.1
    scores[:11, 0], scores[11:, 0] = 0.6, 0.2
    ids = (scores[:, 0] < scores[:, 1] + 0.2).int().unsqueeze(1)
    share = 3 / 8 if subroutine == "sr-f" else 3 * 0.6 / (3 * 0.6 + 5 * 0.2)
    ups = 0
    for i in range(200):
        _, rows, chosen = rounded(scores, ids, 8, subroutine, torch.full((2,), (i + 0.5) / 200))
        assert chosen.tolist() == [11, 5]
        ups += int(rows[0] == 16)
    assert ups == pytest.approx(200 * share, abs=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scores_of_other_dtypes(dtype):
    scores = torch.rand(20, 4).to(dtype)
    score, *_ = round_tokens(scores, top(scores, 2), tile=4)
    assert score.dtype == torch.promote_types(dtype, torch.float32)


def test_gradient_is_exact():
    """The pairs that are kept pass theirs on, every other score gets exactly zero."""
    scores = torch.rand(30, 5, dtype=torch.float64, requires_grad=True)
    ids = top(scores.detach(), 2)
    score, expert, token, *_ = round_tokens(scores, ids, tile=8)
    upstream = torch.randn_like(score)
    (grad,) = torch.autograd.grad(score, scores, upstream)
    want, used = torch.zeros_like(grad), expert >= 0
    want[token[used].long(), expert[used].long()] = upstream[used]
    assert torch.equal(grad, want)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("subroutine", ["nr-f", "up", "down"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_gradient_from_logits(k, subroutine, normalize):
    """dl = s·(d − [in the sum]·Σ s·d) against autograd through the softmax, and differences."""
    logits = torch.randn(30, 5, dtype=torch.float64, requires_grad=True)
    router = TokenRounding(5, k, tile=8, subroutine=subroutine, normalize=normalize)
    r = router(logits)
    dense = softmax_scores(logits, top(logits.detach(), k) if normalize else None)
    used = r.ids >= 0
    want = dense[r.slot_token[used].long(), r.ids[used].long()]
    assert torch.equal(r.scores[used], want)
    upstream = torch.randn_like(r.scores)
    (got,) = torch.autograd.grad(r.scores, logits, upstream)
    (true,) = torch.autograd.grad(want, logits, upstream[used])
    torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x: router(x).scores, logits, eps=1e-7)


@pytest.mark.parametrize("normalize", [False, True])
def test_nothing_wide_is_kept(normalize):
    """From logits the pairs are kept, and who they are, but no scores (T, E)."""
    logits = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        TokenRounding(32, 2, tile=8, normalize=normalize)(logits)
    slots = most_rows(64, 32, 2, 8, "nr-f")
    want = 2 * 64 * 32 + 4 * slots + 4 * 65 + (4 * 64 * 2 if normalize else 0)
    assert sum(t.nbytes for t in kept) == want


MISTAKES = {
    "tile": ({"tile": 0}, "tile", "0"),
    "subroutine": ({"subroutine": "nearest"}, "subroutine", "'nearest'"),
    "no random numbers": ({"subroutine": "sr-f"}, "uniform", "None"),
    "random numbers for nothing": ({"uniform": torch.rand(4)}, "uniform", "a tensor"),
    "too few random numbers": (
        {"subroutine": "nr-s", "uniform": torch.rand(3)}, "uniform", "(3,)"),
    "ids of other tokens": ({"ids": torch.zeros(7, 2, dtype=torch.int32)}, "ids", "(7, 2)"),
    "more choices than experts": ({"ids": torch.zeros(6, 5, dtype=torch.int32)}, "ids", "(6, 5)"),
    "ids of floats": ({"ids": torch.zeros(6, 2)}, "ids", "float32"),
    "scores of integers": ({"scores": torch.ones(6, 4, dtype=torch.int32)}, "scores", "int32"),
    "scores of rank 1": ({"scores": torch.rand(6)}, "scores", "(6,)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake):
    wrong, argument, came = MISTAKES[mistake]
    good = {"scores": torch.rand(6, 4), "ids": torch.zeros(6, 2, dtype=torch.int32)}
    with pytest.raises(ValueError) as raised:
        round_tokens(**good | wrong)
    message = str(raised.value)
    assert message.startswith(f"{argument}: expected ") and f"got {came}" in message.replace(
        "shape ", "").replace("torch.", "")  # fmt: skip


def test_fewer_tokens_than_a_tile_are_said_once():
    errors.say_once.cache_clear()
    router = TokenRounding(4, 2, tile=16)
    with pytest.warns(UserWarning, match="fewer tokens than its tile of 16 drops every token"):
        routing = router(torch.randn(12, 4))
    assert (routing.ids == -1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router(torch.randn(11, 4))
        router.eval()(torch.randn(12, 4))


def test_an_expert_named_twice_is_chosen_once():
    scores = torch.rand(12, 4)
    ids = torch.tensor([[0, 1]]).repeat(12, 1)
    twice = torch.tensor([[0, 1, 1, -1], [0, 1, 0, 7]]).repeat(6, 1)
    for subroutine in ("nr-f", "balance-f", "up"):
        want = round_tokens(scores, ids, tile=5, subroutine=subroutine)
        got = round_tokens(scores, twice, tile=5, subroutine=subroutine)
        assert torch.equal(want[4], got[4]) and torch.equal(want[5], got[5])
