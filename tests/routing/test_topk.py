"""Top-K with its scores, and the permutation."""

import pytest
import torch
from devices import on, values_on
from helpers import DTYPES, ROUTINGS, Case, budget, make_inputs, poisoned
from hypothesis import given
from hypothesis import strategies as st

from sonicmoe import ops, topk_scores
from sonicmoe.layer.run import permute
from sonicmoe.reference import layer as reference
from sonicmoe.shapes import max_tiles

SCORINGS = {
    "softmax_over_topk": (True, False),
    "topk_over_softmax": (False, False),
    "topk_over_softmax_normalized": (False, True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@values_on(
    "scoring",
    cpu=SCORINGS,
    interpreter=["softmax_over_topk", "topk_over_softmax"],
    cuda=SCORINGS,
)
@values_on(
    "tokens, experts, k",
    cpu=[(40, 8, 2), (3, 4096, 64), (20, 60, 6), (4, 3, 3), (5, 1, 1), (0, 8, 2)],
    interpreter=[
        (33, 5, 3),  # more tokens than one program takes, E no power of two
        (3, 300, 4),  # two tokens a program, the last has one
        (3, 4096, 64),  # the largest
        (4, 3, 3),  # K = E
        (2, 1, 1),
        (0, 4, 2),
    ],
    cuda=[
        (1000, 128, 8), (77, 4096, 64), (513, 60, 6), (5, 3, 3), (200, 257, 10), (33, 1000, 8),
        (64, 1, 1), (0, 8, 2),
    ],
)  # fmt: skip
def test_scores_and_their_gradient(dtype, scoring, tokens, experts, k, device, backend):
    over_topk, renormalize = SCORINGS[scoring]
    options = {"softmax_over_topk": over_topk, "renormalize": renormalize}
    logits = torch.randn(tokens, experts, device=device).to(dtype).requires_grad_()
    dscores = torch.randn(tokens, k, device=device)
    with poisoned():
        scores, ids = topk_scores(logits, k, **options, backend=backend)
        (dlogits,) = torch.autograd.grad(scores, logits, dscores)
    assert scores.dtype == torch.float32 and ids.dtype == torch.int32 and dlogits.dtype == dtype
    found = []
    for wide in (torch.float32, torch.float64):
        leaf = logits.detach().to(wide).requires_grad_()
        want, order = reference.route(leaf, k, over_topk, renormalize)
        found.append((want.detach(), *torch.autograd.grad(want, leaf, dscores.to(wide))))
    assert torch.equal(ids.long(), order)  # bf16 logits tie often: the lower id wins
    (rough, drough), (exact, dexact) = found
    budget(scores.detach(), rough, exact, name="scores")
    budget(dlogits, drough.to(dtype), dexact, name="dlogits")


@on("cpu", "interpreter")
def test_equal_logits_go_to_the_lower_id(backend):
    logits = torch.tensor([[0.0, 1.0, 1.0, -0.0, 1.0], [0.0, -0.0, 0.0, -1.0, -0.0]])
    _, ids = topk_scores(logits, 4, backend=backend)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 4]]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_large_logits_do_not_overflow(scoring):
    over_topk, renormalize = SCORINGS[scoring]
    logits = torch.tensor([[1e4, 0.0, -1e4], [1e4, 1e4, -1e4]], requires_grad=True)
    scores, _ = topk_scores(logits, 2, softmax_over_topk=over_topk, renormalize=renormalize)
    scores.sum().backward()
    torch.testing.assert_close(scores, torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    assert logits.grad.isfinite().all()


# --- the permutation ------------------------------------------------------------------------------
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


@pytest.mark.parametrize("routing", ROUTINGS)
@values_on(
    "shape",
    interpreter=[
        "40,8,8,5,3", "300,8,8,3,2", "512,8,8,40,2", "900,8,8,40,3", "0,8,8,4,2", "1,8,8,4,2"
    ],
    cuda=["1000,8,8,64,8", "40000,8,8,128,8", "3,8,8,1000,2", "0,8,8,4,2"],
)  # fmt: skip
def test_permutation_is_the_reference_one(shape, routing, device):
    case = Case(shape, routing=routing)
    ids, experts = make_inputs(case).ids, case.problem.E
    want = permute(ids, experts, backend="torch")
    with poisoned():
        got = permute(ids.to(device), experts, backend="triton")
    used, tiles = int(want.expert_start[-1]), int(want.tiles[0, 0])
    assert torch.equal(got.counts.cpu(), want.counts)
    assert torch.equal(got.expert_start.cpu(), want.expert_start)
    assert torch.equal(got.row_token[:used].cpu(), want.row_token[:used])
    assert torch.equal(got.row_slot[:used].cpu(), want.row_slot[:used])
    assert torch.equal(got.slot_row.cpu(), want.slot_row)
    assert torch.equal(got.tiles[: 1 + tiles].cpu(), want.tiles[: 1 + tiles])


@on("interpreter")
@pytest.mark.parametrize(
    "start", [[0, 0, 0], [0, 5, 5], [0, 0, 130], [0, 128, 300], [7, 140, 290]], ids=str
)
def test_tiles_of_rows_that_arrive_sorted(start):
    offsets = torch.tensor(start, dtype=torch.int32)
    expert_start, want = ops.tiles(offsets, 300, 128, "torch")
    with poisoned():
        got_start, got = ops.tiles(offsets, 300, 128, "triton")
    count = int(want[0, 0])
    assert torch.equal(got[: 1 + count], want[: 1 + count])
    assert torch.equal(got_start, expert_start)
    assert expert_start.tolist() == start and want[0, 2] == 0


OUT_OF_BOUNDS = [[0, 128, 301], [0, 10, 9], [-1, 5, 9], [0, 0, 2**40], [0, -(2**40), 5]]


@on("interpreter")
@pytest.mark.parametrize("start", OUT_OF_BOUNDS, ids=str)
def test_offsets_out_of_bounds_give_no_tiles(start):
    with poisoned():
        expert_start, tiles = ops.tiles(torch.tensor(start), 300, 128, "triton")
    assert expert_start.tolist() == [0, 0, 0] and tiles[0].tolist() == [0, 0, 1, 0]


@on("interpreter")
def test_the_largest_number_of_experts():
    ids = torch.tensor([[32766, 0], [40000, 32766], [-1, 16384]])
    with poisoned():
        got = permute(ids, 32767, backend="triton")
    assert got.row_slot[:4].tolist() == [1, 5, 0, 3]
    assert got.expert_start[-1] == 4 and got.counts[32766] == 2
    with pytest.raises(ValueError, match="num_experts: expected at most 32767 experts, got 32768"):
        permute(ids, 32768, backend="triton")


@on("cuda")
@pytest.mark.parametrize("experts", [5000, 20000, 32767])
def test_many_experts(experts):
    logits = torch.randn(300, experts, device="cuda")
    _, ids = topk_scores(logits, 4)
    assert torch.equal(ids.long(), logits.topk(4).indices)
    got = permute(ids, experts, backend="triton")
    want = permute(ids.cpu(), experts, backend="torch")
    assert torch.equal(got.slot_row.cpu(), want.slot_row)
    assert torch.equal(got.expert_start.cpu(), want.expert_start)
