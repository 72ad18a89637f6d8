"""Each router against its definition, its gradients, its statistics and losses."""

import copy
import math

import pytest
import torch
from helpers import budget, written_out_loss
from score_matrices import kept_pairs, top

from sonicmoe import topk_scores
from sonicmoe.reference import layer as reference
from sonicmoe.reference import routers
from sonicmoe.routing import (
    ROUTERS,
    ExpertChoice,
    Routing,
    Sigmoid,
    TokenRounding,
    TopK,
    auxiliary_loss,
    make_router,
    route,
    statistics,
    switch_loss,
    z_loss,
)

SOFTMAX = {
    "softmax_over_topk": (True, False),
    "topk_over_softmax": (False, False),
    "topk_over_softmax_normalized": (False, True),
}


def logits_of(tokens, experts, dtype=torch.float64):
    return torch.randn(tokens, experts, dtype=dtype, requires_grad=True)


def same(got, want, logits):
    """Values and gradients under a random upstream gradient."""
    torch.testing.assert_close(got, want.to(got.dtype))
    upstream = torch.randn_like(want)
    (exact,) = torch.autograd.grad(want, logits, upstream)
    (ours,) = torch.autograd.grad(got, logits, upstream.to(got.dtype))
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("name", SOFTMAX)
def test_top_k_family(name):
    logits = logits_of(20, 6)
    r = route(logits, 2, name)
    scores, ids = reference.route(logits, 2, *SOFTMAX[name])
    assert torch.equal(r.ids.long(), ids) and r.logits is logits and r.slot_token is None
    assert r.counts().tolist() == ids.flatten().bincount(minlength=6).tolist()
    same(r.scores, scores, logits)


@pytest.mark.parametrize(
    ("k", "groups", "kept", "normalize", "scale"),
    [(2, 1, 1, True, 1.0), (3, 4, 2, True, 2.5), (2, 4, 1, False, 1.0), (4, 12, 6, True, 16.0)],
)
def test_sigmoid_is_deepseek_v3(k, groups, kept, normalize, scale):
    router = Sigmoid(
        12, k, groups=groups, groups_kept=kept, normalize=normalize, scale=scale
    ).double()
    router.selection_bias.copy_(0.3 * torch.randn(12))
    logits = logits_of(40, 12)
    r = router(logits)
    scores, ids = routers.sigmoid(logits, router.selection_bias, k, groups, kept, normalize, scale)
    assert torch.equal(r.ids.long(), ids)
    same(r.scores, scores, logits)
    if normalize:
        torch.testing.assert_close(r.scores.sum(-1), torch.full((40,), scale).double())


def test_sigmoid_bias_moves_towards_balance():
    """A router that prefers expert 0 learns to spread, and the weights never see the bias."""
    router, logits = Sigmoid(4, 1), torch.randn(400, 4) + torch.tensor([2.0, 0.0, 0.0, 0.0])
    before = router(logits).counts()
    router.load.zero_()
    for _ in range(300):
        r = router(logits)
        assert torch.equal(router.load, r.counts().float())
        router.update_bias(0.01)
        assert (router.load == 0).all()
    after = router(logits).counts()
    assert after.float().std() < before.float().std() / 5
    assert torch.equal(router(logits).scores, torch.ones(400, 1))  # one choice, normalised


def test_sigmoid_bias_sees_the_global_batch():
    """The other rank has the opposite load: together they balance."""
    router = Sigmoid(2, 1)
    router(torch.tensor([[5.0, -5.0]] * 3))
    assert router.load.tolist() == [3, 0]
    router.update_bias(0.5, all_reduce=lambda load: load + load.flip(0))
    assert router.selection_bias.tolist() == [0, 0]
    router(torch.tensor([[5.0, -5.0]] * 3))
    router.update_bias(0.5)
    assert router.selection_bias.tolist() == [-0.5, 0.5]
    router.eval()(torch.randn(5, 2))
    assert router.load.tolist() == [0, 0]


def test_sigmoid_bias_stays_in_fp32():
    router = Sigmoid(4, 2)
    router.selection_bias.fill_(1.0).add_(2**-12)
    router.to(torch.bfloat16)
    assert router.selection_bias.dtype == torch.float32
    assert (router.selection_bias == 1 + 2**-12).all()
    with torch.device("meta"):
        empty = Sigmoid(4, 2)
    assert empty.to(torch.bfloat16).to_empty(device="cpu").selection_bias.dtype == torch.float32
    assert list(router.state_dict()) == ["selection_bias"]


@pytest.mark.parametrize(("tokens", "experts", "k"), [(20, 6, 2), (7, 3, 3), (1, 4, 1), (0, 4, 2)])
def test_expert_choice(tokens, experts, k):
    logits = logits_of(tokens, experts)
    r = ExpertChoice(experts, k)(logits)
    taken = kept_pairs(r.ids, r.slot_token, tokens, experts)
    assert torch.equal(taken, routers.expert_choice(logits.detach(), k))
    assert (r.slot_token.diff() >= 0).all()
    assert r.counts().unique().numel() <= 1
    same(r.scores, logits.softmax(-1)[r.slot_token.long(), r.ids.long()], logits)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_token_rounding_scores(normalize, k):
    """Every pair, an added one too, has the softmax score; `normalize` divides by the K largest."""
    logits = logits_of(48, 5)
    r = TokenRounding(5, k, tile=16, normalize=normalize)(logits)
    assert (r.counts() % 16 == 0).all()
    chosen = top(logits.detach(), k)
    assert r.chosen.tolist() == chosen.flatten().bincount(minlength=5).tolist()
    dense = logits.softmax(-1)
    if normalize:
        dense = dense / dense.gather(1, chosen.long()).sum(-1, keepdim=True)
    used = (r.ids >= 0).double()
    want = dense[r.slot_token.long().clamp(max=47), r.ids.long().clamp(min=0)] * used
    same(r.scores, want, logits)


@pytest.mark.parametrize("name", ["token_rounding", "expert_choice"])
def test_evaluation_is_plain_top_k(name):
    router, logits = make_router(name, 6, 2).eval(), torch.randn(50, 6)
    r = router(logits)
    scores, ids = topk_scores(logits, 2, softmax_over_topk=False)
    assert torch.equal(r.ids, ids) and torch.equal(r.scores, scores)
    assert r.slot_token is None and r.chosen is None


@pytest.mark.parametrize("subroutine", ["sr-f", "nr-s"])
def test_seeds(subroutine):
    """The same seed, the same rows: from a generator, from torch's own, or as numbers."""
    logits = torch.randn(600, 16)

    def rows(seed=None, uniform=None):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        router = TokenRounding(16, 2, tile=32, subroutine=subroutine, generator=generator)
        return router(logits, uniform=uniform).counts().tolist()

    assert rows(seed=1) == rows(seed=1)
    assert len({tuple(rows(seed=s)) for s in range(8)}) > 1
    torch.manual_seed(3)
    first = rows()
    torch.manual_seed(3)
    assert rows() == first
    uniform = torch.rand(16)
    assert rows(uniform=uniform) == rows(uniform=uniform)
    router = TokenRounding(16, 2, subroutine=subroutine, generator=torch.Generator())
    copy.deepcopy(router)(logits)


# --- losses and statistics ------------------------------------------------------------------------
def test_losses():
    logits = torch.randn(30, 5, requires_grad=True)
    counts = torch.tensor([10, 5, 0, 20, 25])
    share = logits.softmax(-1).mean(0)
    torch.testing.assert_close(switch_loss(logits, counts), 5 * (share * counts / 60).sum())
    both = switch_loss(logits, counts, all_reduce=lambda c: c + torch.tensor([0.0, 5, 10, 0, 5]))
    torch.testing.assert_close(both, 5 * (share * torch.tensor([10, 10, 10, 20, 30]) / 80).sum())
    torch.testing.assert_close(z_loss(logits), logits.logsumexp(-1).square().mean())
    assert switch_loss(torch.zeros(8, 4), torch.full((4,), 4)).item() == pytest.approx(1)
    assert z_loss(torch.zeros(0, 4)) == 0


def test_gradient_of_the_losses_by_differences():
    logits = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([10, 5, 0, 20, 25])
    assert torch.autograd.gradcheck(
        lambda t: auxiliary_loss(t, counts, balance=0.5, z=0.1), (logits,)
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_the_losses(dtype):
    logits = torch.randn(30, 5, dtype=dtype, requires_grad=True)
    counts, upstream = torch.tensor([10, 5, 0, 20, 25]), torch.randn((), dtype=torch.float64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = auxiliary_loss(logits, counts, balance=0.5, z=0.1)
    assert sorted(t.nbytes for t in kept) == sorted([logits.nbytes, 4 * 5])
    found = torch.autograd.grad(loss, logits, upstream.to(loss.dtype))[0]
    (rough, drough), (exact, dexact) = (
        written_out_loss(logits.to(wide), counts, 0.5, 0.1, upstream.to(wide))
        for wide in (loss.dtype, torch.float64)
    )
    budget(loss.detach(), rough, exact, tokens=30)
    budget(found, drough.to(dtype), dexact)
    with pytest.raises(ValueError, match=r"counts: expected shape \(E,\)"):
        auxiliary_loss(logits, counts[:4])


def test_statistics_of_rounding():
    logits = torch.randn(256, 8)
    r = TokenRounding(8, 2, tile=32)(logits)
    s = statistics(r, tile=32)
    assert torch.equal(s.rows, r.counts()) and s.padding_after == 0
    choice = top(logits, 2).flatten().bincount(minlength=8)
    assert s.dropped == (choice - s.rows).clamp_min(0).sum() and s.dropped > 0
    assert s.added == (s.rows - choice).clamp_min(0).sum() and s.added > 0
    padded = (-(-choice // 32) * 32).sum()
    assert s.padding_before.item() == pytest.approx(1 - 512 / padded.item())
    assert s.entropy.item() == pytest.approx(
        torch.distributions.Categorical(logits=logits).entropy().mean().item()
    )


@pytest.mark.parametrize("subroutine", ["down", "up"])
def test_dropped_and_added_differ_where_rounding_goes_one_way(subroutine):
    logits = torch.randn(256, 8)
    s = statistics(TokenRounding(8, 2, tile=32, subroutine=subroutine)(logits), tile=32)
    lost = 2 * 256 - s.rows.sum()
    assert lost != 0
    assert (s.dropped, s.added) == ((lost, 0) if subroutine == "down" else (0, -lost))


def test_statistics_without_rounding_and_without_tokens():
    s = statistics(route(torch.zeros(64, 4), 1))
    assert s.rows.tolist() == [64, 0, 0, 0] and s.padding_before == s.padding_after == 0.5
    assert s.dropped == s.added == 0 and s.entropy.item() == pytest.approx(math.log(4))
    for name in ROUTERS:
        empty = statistics(route(torch.zeros(0, 4), 1, name))
        assert empty.padding_after == 0 and empty.entropy == 0 and empty.rows.sum() == 0


# --- one form for all -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_compiled_without_a_graph_break(name, mode):
    torch._dynamo.reset()
    router = make_router(name, 6, 2).train(mode)
    twin = copy.deepcopy(router)
    compiled = torch.compile(router, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (40, 150):
        logits = torch.randn(tokens, 6, requires_grad=True)
        got, want = compiled(logits), twin(logits)
        assert isinstance(got, Routing) and torch.equal(got.ids, want.ids)
        same(got.scores, want.scores, logits)
    assert all(torch.equal(a, b) for a, b in zip(router.buffers(), twin.buffers(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROUTERS)
def test_scores_are_fp32(name, dtype):
    r = route(torch.randn(300, 6).to(dtype), 2, name)
    assert r.scores.dtype == torch.float32 and r.ids.dtype == torch.int32


MISTAKES = {
    "name": (lambda: make_router("nearest", 4, 2), "router", "'nearest'"),
    "router of another layer": (lambda: make_router(TopK(5, 2), 4, 2), "router", "one for 5 and 2"),
    "k": (lambda: route(torch.randn(3, 4), 5), "k", "5"),
    "logits of other experts": (lambda: TopK(5, 2)(torch.randn(3, 4)), "logits", "(3, 4)"),
    "logits of rank 3": (lambda: Sigmoid(4, 2)(torch.randn(1, 3, 4)), "logits", "(1, 3, 4)"),
    "integer logits": (
        lambda: ExpertChoice(4, 2)(torch.ones(3, 4, dtype=torch.int32)), "logits", "torch.int32"),
    "groups": (lambda: Sigmoid(8, 2, groups=3), "groups", "3"),
    "kept groups": (lambda: Sigmoid(8, 2, groups=4, groups_kept=5), "groups_kept", "5"),
    "k in kept groups": (lambda: Sigmoid(8, 3, groups=4, groups_kept=1), "k", "3"),
    "tile": (lambda: TokenRounding(8, 2, tile=-1), "tile", "-1"),
    "subroutine": (lambda: TokenRounding(8, 2, subroutine="NR"), "subroutine", "'NR'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake):
    call, argument, came = MISTAKES[mistake]
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value).startswith(f"{argument}: expected ")
    assert f"got {came}." in str(raised.value)
