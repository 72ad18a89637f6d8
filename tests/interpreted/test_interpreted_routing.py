"""Top-K, the auxiliary loss and the permutation under the interpreter."""

import pytest
import torch
from helpers import DTYPES, ROUTINGS, Case, budget, make_inputs, poisoned, written_out_loss

import sonicmoe
from sonicmoe import ops
from sonicmoe.launch import routing as launch_routing
from sonicmoe.layer.run import permute
from sonicmoe.reference import layer as reference
from sonicmoe.reference import routers
from sonicmoe.routing import Sigmoid, auxiliary_loss


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("over_topk", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [
        (33, 5, 3),  # more tokens than one program takes, E no power of two
        (3, 300, 4),  # two tokens a program, the last has one
        (3, 4096, 64),  # the largest
        (4, 3, 3),  # K = E
        (2, 1, 1),
        (0, 4, 2),
    ],
)
def test_topk(dtype, over_topk, tokens, experts, k):
    logits = torch.randn(tokens, experts).to(dtype).requires_grad_()
    dscores = torch.randn(tokens, k)
    with poisoned():
        scores, ids = sonicmoe.topk_scores(logits, k, softmax_over_topk=over_topk, backend="triton")
        (dlogits,) = torch.autograd.grad(scores, logits, dscores)
    found = []
    for wide in (torch.float32, torch.float64):
        leaf = logits.detach().to(wide).requires_grad_()
        want, order = reference.route(leaf, k, over_topk)
        found.append((want.detach(), *torch.autograd.grad(want, leaf, dscores.to(wide))))
        assert torch.equal(ids.long(), order)
    (rough, drough), (exact, dexact) = found
    budget(scores.detach(), rough, exact, name="scores")
    budget(dlogits, drough.to(dtype), dexact, name="dlogits")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "weights"),
    [
        (200, 5, (0.5, 0.1)),  # more tokens than all programs take at once, E no power of two
        (6, 4096, (1.0, 0.0)),  # more programs than are added up at once
        (3, 300, (0.0, 1.0)),
        (2, 1, (1.0, 0.0)),
        (0, 4, (0.5, 0.1)),
    ],
)
def test_auxiliary_loss(dtype, tokens, experts, weights, monkeypatch):
    monkeypatch.setattr(launch_routing, "_SUMS", 6)
    logits = torch.randn(tokens, experts).to(dtype).requires_grad_()
    counts = torch.randint(100, (experts,), dtype=torch.int32) if weights[0] else None
    upstream = torch.randn(())
    with poisoned():
        loss = auxiliary_loss(
            logits, counts, balance=weights[0], z=weights[1], backend="triton"
        )  # fmt: skip
        (dlogits,) = torch.autograd.grad(loss, logits, upstream)
    (rough, drough), (exact, dexact) = (
        written_out_loss(logits.detach().to(wide), counts, *weights, upstream.to(wide))
        for wide in (torch.float32, torch.float64)
    )
    budget(loss.detach(), rough, exact, name="loss", tokens=tokens)
    budget(dlogits, drough.to(dtype), dexact, name="dlogits")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "groups", "kept"),
    [
        (33, 5, 3, 1, 1),  # more tokens than one program takes, E no power of two
        (20, 32, 4, 8, 4),
        (7, 15, 2, 5, 2),  # groups of three
        (6, 4, 2, 4, 3),  # groups of one
        (3, 300, 6, 1, 1),
        (0, 4, 2, 2, 1),
    ],
)
def test_sigmoid(dtype, normalize, tokens, experts, k, groups, kept):
    router = Sigmoid(
        experts, k, groups=groups, groups_kept=kept, normalize=normalize, scale=2.5
    )  # fmt: skip
    router.selection_bias.normal_(std=0.1)
    logits = torch.randn(tokens, experts).to(dtype).requires_grad_()
    dscores = torch.randn(tokens, k)
    with poisoned():
        r = router(logits, backend="triton")
        (dlogits,) = torch.autograd.grad(r.scores, logits, dscores)
    assert torch.equal(router.load, r.ids.flatten().bincount(minlength=experts).float())
    found = []
    for wide in (torch.float32, torch.float64):
        leaf = logits.detach().to(wide).requires_grad_()
        options = (k, groups, kept, normalize, 2.5)
        if tokens:
            scores, ids = routers.sigmoid(leaf, router.selection_bias, *options)
            assert torch.equal(r.ids.long(), ids)
        else:
            scores = leaf[:, :k]
        found.append((scores.detach(), *torch.autograd.grad(scores, leaf, dscores.to(wide))))
    (rough, drough), (exact, dexact) = found
    budget(r.scores.detach(), rough, exact, name="scores")
    budget(dlogits, drough.to(dtype), dexact, name="dlogits")


def test_equal_logits_go_to_the_lower_id():
    logits = torch.tensor([[0.0, 1.0, 1.0, -0.0, 1.0], [0.0, -0.0, 0.0, -1.0, -0.0]])
    _, ids = sonicmoe.topk_scores(logits, 4, backend="triton")
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 4]]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "shape",
    ["40,8,8,5,3", "300,8,8,3,2", "512,8,8,40,2", "900,8,8,40,3", "0,8,8,4,2", "1,8,8,4,2"],
)
def test_permutation_is_the_reference_one(shape, routing):
    case = Case(shape, routing=routing)
    ids, experts = make_inputs(case).ids, case.problem.E
    want = permute(ids, experts, backend="torch")
    with poisoned():
        got = permute(ids, experts, backend="triton")
    used, tiles = int(want.expert_start[-1]), int(want.tiles[0, 0])
    assert torch.equal(got.counts, want.counts)
    assert torch.equal(got.expert_start, want.expert_start)
    assert torch.equal(got.row_token[:used], want.row_token[:used])
    assert torch.equal(got.row_slot[:used], want.row_slot[:used])
    assert torch.equal(got.slot_row, want.slot_row)
    assert torch.equal(got.tiles[: 1 + tiles], want.tiles[: 1 + tiles])


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


@pytest.mark.parametrize("start", OUT_OF_BOUNDS, ids=str)
def test_offsets_out_of_bounds_give_no_tiles(start):
    with poisoned():
        expert_start, tiles = ops.tiles(torch.tensor(start), 300, 128, "triton")
    assert expert_start.tolist() == [0, 0, 0] and tiles[0].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("start", OUT_OF_BOUNDS[:3], ids=str)
def test_offsets_out_of_bounds_poison_the_output(start):
    given = make_inputs(Case("300,16,8,2,1", torch.float32))
    x, w1 = given.x.requires_grad_(), given.w1.requires_grad_()
    with poisoned():
        out = sonicmoe.grouped_experts(
            x, None, w1, given.w2, offsets=torch.tensor(start), backend="triton"
        )
        dx, dw1 = torch.autograd.grad(out, (x, w1), given.dout)
    assert out.isnan().all() and dx.isnan().all() and (dw1 == 0).all()


def test_the_largest_number_of_experts():
    ids = torch.tensor([[32766, 0], [40000, 32766], [-1, 16384]])
    with poisoned():
        got = permute(ids, 32767, backend="triton")
    assert got.row_slot[:4].tolist() == [1, 5, 0, 3]
    assert got.expert_start[-1] == 4 and got.counts[32766] == 2
    with pytest.raises(ValueError, match="num_experts: expected at most 32767 experts, got 32768"):
        permute(ids, 32768, backend="triton")
