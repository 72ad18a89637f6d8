"""Top-K with its scores, and the permutation."""

import pytest
import torch
from helpers import DTYPES, budget
from hypothesis import given
from hypothesis import strategies as st

from sonicmoe import topk_scores
from sonicmoe.layer.run import permute
from sonicmoe.reference import layer as reference
from sonicmoe.shapes import max_tiles

SCORINGS = {
    "softmax_over_topk": (True, False),
    "topk_over_softmax": (False, False),
    "topk_over_softmax_normalized": (False, True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(40, 8, 2), (3, 4096, 64), (20, 60, 6), (4, 3, 3), (5, 1, 1), (0, 8, 2)],
)
def test_scores_and_their_gradient(dtype, scoring, tokens, experts, k):
    over_topk, renormalize = SCORINGS[scoring]
    logits = torch.randn(tokens, experts).to(dtype).requires_grad_()
    dscores = torch.randn(tokens, k)
    scores, ids = topk_scores(logits, k, softmax_over_topk=over_topk, renormalize=renormalize)
    (dlogits,) = torch.autograd.grad(scores, logits, dscores)
    assert scores.dtype == torch.float32 and ids.dtype == torch.int32 and dlogits.dtype == dtype
    found = []
    for wide in (torch.float32, torch.float64):
        leaf = logits.detach().to(wide).requires_grad_()
        want, order = reference.route(leaf, k, over_topk, renormalize)
        assert torch.equal(ids.long(), order)
        found.append((want.detach(), *torch.autograd.grad(want, leaf, dscores.to(wide))))
    (rough, drough), (exact, dexact) = found
    budget(scores.detach(), rough, exact, name="scores")
    budget(dlogits, drough.to(dtype), dexact, name="dlogits")


def test_equal_logits_go_to_the_lower_id():
    logits = torch.tensor([[0.0, 1.0, 1.0, -0.0, 1.0], [0.0, -0.0, 0.0, -1.0, -0.0]])
    _, ids = topk_scores(logits, 4)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 4]]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_large_logits_do_not_overflow(scoring):
    over_topk, renormalize = SCORINGS[scoring]
    logits = torch.tensor([[1e4, 0.0, -1e4], [1e4, 1e4, -1e4]], requires_grad=True)
    scores, _ = topk_scores(logits, 2, softmax_over_topk=over_topk, renormalize=renormalize)
    scores.sum().backward()
    torch.testing.assert_close(scores, torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    assert logits.grad.isfinite().all()


@st.composite
def choices(draw):
    """(T, K) ids, some of them of experts that are not here, and the number of experts."""
    experts = draw(st.integers(1, 9))
    tokens, k = draw(st.integers(0, 300)), draw(st.integers(1, 4))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    low, high = draw(st.sampled_from([(0, experts), (-2, experts + 3), (0, 1), (-3, 0)]))
    ids = torch.randint(low, high, (tokens, k), generator=seed)
    return ids.to(draw(st.sampled_from([torch.int32, torch.int64]))), experts


@given(choices(), st.sampled_from([torch.bfloat16, torch.float32]))
def test_permutation_invariants(choice, dtype):
    ids, experts = choice
    p = permute(ids, experts, dtype=dtype)
    flat, slots = ids.flatten().long(), ids.numel()
    here = (flat >= 0) & (flat < experts)
    start, used = p.expert_start.tolist(), int(here.sum())
    row_slot, slot_row = p.row_slot[:used].long(), p.slot_row.long()

    assert p.row_slot.shape == (slots,) and p.expert_start.shape == (experts + 1,)
    assert start[0] == 0 and start[-1] == used
    assert p.counts.tolist() == torch.bincount(flat[here], minlength=experts).tolist()
    assert torch.equal(slot_row[row_slot], torch.arange(used))  # inverse to each other
    assert torch.equal(row_slot[slot_row[here]], here.nonzero()[:, 0])
    assert (slot_row[~here] == -1).all()
    assert torch.equal(p.row_token[:used].long(), row_slot // ids.shape[1])
    for e in range(experts):  # sorted by expert, in the order of the slots within one
        mine = row_slot[start[e] : start[e + 1]]
        assert torch.equal(mine, (flat == e).nonzero()[:, 0])

    count = int(p.tiles[0, 0])
    assert p.tiles.shape == (1 + max_tiles(slots, experts, p.tile_m), 4)
    covered = torch.zeros(slots, dtype=torch.int64)
    for e, begin, end, number in p.tiles[1 : 1 + count].tolist():
        assert (begin, end) == (start[e], start[e + 1])
        first = begin + number * p.tile_m
        last = min(first + p.tile_m, end)
        assert start[e] <= first < last
        covered[first:last] += 1
    assert (covered[:used] == 1).all() and (covered[used:] == 0).all()


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 5))
def test_slots_named_by_token(tokens_of_slots, experts):
    slot_token = torch.tensor(sorted(tokens_of_slots), dtype=torch.int32)
    ids = torch.arange(len(slot_token), dtype=torch.int32) % (experts + 1)  # some are not here
    p = permute(ids, experts, slot_token=slot_token, tokens=7)
    used = int(p.expert_start[-1])
    assert torch.equal(p.row_token[:used], slot_token[p.row_slot[:used].long()])
    per_token = torch.bincount(slot_token.long(), minlength=7)
    assert torch.equal(p.token_start.diff().long(), per_token)
