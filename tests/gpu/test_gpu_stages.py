"""Top-K, configurations of other devices, rows that arrive sorted, the published functions."""

import pytest
import torch
from helpers import (
    ROUTINGS,
    Case,
    budget,
    check_experts,
    check_fp32_weights,
    check_main_grad,
    compare,
    make_inputs,
    plain,
    poisoned,
    run,
)

import sonicmoe
from sonicmoe import ActivationType
from sonicmoe.layer.run import permute
from sonicmoe.reference import layer as reference
from sonicmoe.tuning import Target

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.mark.parametrize("arch", [80, 86, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_configurations_of_other_devices(arch, dtype, monkeypatch):
    """What smaller and newer devices are given runs here as well."""
    from sonicmoe.launch import grouped_gemm

    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: Target(arch, 100))
    check_experts(Case("333,264,136,6,3", dtype, bias=True, transposed=True), CUDA, "triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [
        (1000, 128, 8),
        (77, 4096, 64),
        (513, 60, 6),
        (5, 3, 3),
        (200, 257, 10),
        (33, 1000, 8),
        (64, 1, 1),
        (0, 8, 2),
    ],
)
@pytest.mark.parametrize("over_topk", [True, False])
@pytest.mark.parametrize("renormalize", [False, True])
def test_topk(dtype, tokens, experts, k, over_topk, renormalize):
    if over_topk and renormalize:
        pytest.skip("scores of a softmax over the choice sum to one already")
    logits = torch.randn(tokens, experts, device=CUDA).to(dtype).requires_grad_()
    dscores = torch.randn(tokens, k, device=CUDA)
    options = {"softmax_over_topk": over_topk, "renormalize": renormalize}
    with poisoned():
        scores, ids = sonicmoe.topk_scores(logits, k, **options)
        (dlogits,) = torch.autograd.grad(scores, logits, dscores)
    exact_logits = logits.detach().double().requires_grad_()
    exact, order = reference.route(exact_logits, k, over_topk, renormalize)
    (dexact,) = torch.autograd.grad(exact, exact_logits, dscores.double())
    rough_logits = logits.detach().float().requires_grad_()
    rough, _ = reference.route(rough_logits, k, over_topk, renormalize)
    (drough,) = torch.autograd.grad(rough, rough_logits, dscores)

    assert scores.dtype == torch.float32 and dlogits.dtype == dtype
    assert torch.equal(ids.long(), order)  # bf16 logits tie often: the lower id wins
    budget(scores.detach(), rough.detach(), exact.detach(), name="scores")
    budget(dlogits, drough.to(dtype), dexact, name="dlogits")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", ["1000,8,8,64,8", "40000,8,8,128,8", "3,8,8,1000,2", "0,8,8,4,2"])
def test_permutation_is_the_reference_one(shape, routing):
    case = Case(shape, routing=routing)
    ids, experts = make_inputs(case).ids, case.problem.E
    want = permute(ids, experts, backend="torch")
    with poisoned():
        got = permute(ids.cuda(), experts, backend="triton")
    used, tiles = int(want.expert_start[-1]), int(want.tiles[0, 0])
    assert torch.equal(got.counts.cpu(), want.counts)
    assert torch.equal(got.expert_start.cpu(), want.expert_start)
    assert torch.equal(got.row_token[:used].cpu(), want.row_token[:used])
    assert torch.equal(got.row_slot[:used].cpu(), want.row_slot[:used])
    assert torch.equal(got.slot_row.cpu(), want.slot_row)
    assert torch.equal(got.tiles[: 1 + tiles].cpu(), want.tiles[: 1 + tiles])


@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.parametrize(
    "counts",
    [
        [130, 0, 7, 256, 0],  # empty experts, one of them the last
        [0, 0, 0, 0, 0],  # a rank that received nothing
        [1, 1, 1, 1, 1],
        [0, 500, 0, 0, 0],  # one expert takes all
        [4] * 149,  # every program computes several tiles
    ],
    ids=lambda counts: f"{len(counts)}x{max(counts)}",
)
def test_grouped_rows_and_a_tail_of_garbage(counts, with_scores):
    experts, used = len(counts), sum(counts)
    case = Case(f"600,264,136,{experts},1", bias=True)
    given, sizes = make_inputs(case, CUDA), torch.tensor(counts, device=CUDA)
    given.ids.fill_(-1)
    given.ids[:used, 0] = torch.arange(experts, device=CUDA).repeat_interleave(sizes)
    if not with_scores:
        given.scores = torch.ones_like(given.scores)
    rough, exact = run(plain(case), given), run(plain(case), given.double())
    for t in (given.x, given.scores, given.dout):
        t[used:] = float("nan")

    def grouped(x, ids, scores, **weights):
        scores = scores.squeeze(1) if with_scores else None
        return sonicmoe.grouped_experts(
            x, torch.tensor(counts, device=CUDA), scores=scores, **weights
        )

    if not with_scores:
        given.differentiable = ("x", "w1", "w2", "b1", "b2")
    with poisoned():
        got = run(grouped, given)
    compare(got, rough, exact, case.dtype)
    assert (got["out"][used:] == 0).all() and (got["dx"][used:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@pytest.mark.parametrize(
    ("tokens", "routing"), [(777, "uniform"), (777, "empty_experts"), (12000, "zipf")]
)
def test_weight_gradients_added_to_a_buffer(dtype, transposed, tokens, routing):
    shape = f"{tokens},264,136,6,2"
    check_main_grad(Case(shape, dtype, transposed=transposed, routing=routing), CUDA, "triton")


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@pytest.mark.parametrize(
    ("tokens", "routing"), [(777, "uniform"), (777, "empty_experts"), (12000, "zipf")]
)
def test_gradients_of_fp32_weights(transposed, tokens, routing):
    case = Case(f"{tokens},264,136,6,2", bias=True, transposed=transposed, routing=routing)
    check_fp32_weights(case, CUDA, "triton")


@pytest.mark.parametrize("concatenated", [False, True])
def test_published_functions(concatenated):
    case = Case(
        "300,256,128,8,2",
        activation=ActivationType.GEGLU,
        gate_up="concatenated" if concatenated else "interleaved",
    )
    given = make_inputs(case, CUDA)

    def published(x, ids, scores, w1, w2, b1, b2):
        order = torch.randperm(600, device=CUDA)
        token = torch.arange(300, device=CUDA, dtype=torch.int32).repeat_interleave(2)
        out, counts = sonicmoe.moe_general_routing_inputs(
            x, scores.flatten()[order], token[order], ids.flatten()[order],
            w1.permute(1, 2, 0), b1, w2.permute(1, 2, 0), b2, 8, None,
            ActivationType.GEGLU, concat_layout=concatenated,
        )  # fmt: skip
        assert torch.equal(counts.long(), ids.flatten().long().bincount(minlength=8))
        return out

    with poisoned():
        got = run(published, given)
    compare(got, run(plain(case), given), run(plain(case), given.double()), case.dtype)
