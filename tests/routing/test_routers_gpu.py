"""Routers on a GPU: the plain result, bitwise the same twice, no synchronisation, CUDA graphs."""

import pytest
import torch
import torch.nn.functional as F
from helpers import budget, poisoned, same_bits, written_out_loss
from score_matrices import SCORES, assert_softmax, top

from sonicmoe import MoE, ops
from sonicmoe.reference.token_rounding import SUBROUTINES
from sonicmoe.routing import ROUTERS, TokenRounding, auxiliary_loss, make_router
from sonicmoe.routing.scores import router_logits

pytestmark = pytest.mark.gpu
SHAPES = [(4096, 64, 4, 128), (1000, 20, 3, 96), (16384, 256, 4, 128), (50, 4, 2, 64)]


@pytest.mark.parametrize("subroutine", SUBROUTINES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "tied"])
def test_kernels_keep_what_plain_pytorch_keeps(shape, subroutine, kind):
    tokens, experts, k, tile = shape
    scores = SCORES[kind](tokens, experts, torch.Generator().manual_seed(0)).cuda()
    ids, uniform = top(scores, k), torch.rand(experts, device="cuda")
    want = ops.round_tokens(scores, ids, tile, subroutine, uniform, "torch")
    with poisoned():
        got = ops.round_tokens(scores, ids, tile, subroutine, uniform, "triton")
        again = ops.round_tokens(scores, ids, tile, subroutine, uniform, "triton")
    same_bits(dict(enumerate(got)), dict(enumerate(want)))
    same_bits(dict(enumerate(got)), dict(enumerate(again)))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_round_as_their_scores(shape, normalize):
    """The softmax to a few ulps; the pairs exactly those of the scores that come out."""
    tokens, experts, k, tile = shape
    logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)
    ids = ops.topk(logits, k, True, "triton")[1]
    # A tile of T rows that goes up takes in every pair of an expert that anyone chose.
    expert, _, score, *_ = ops.round_logits(logits, ids, normalize, tokens, "up", None, "triton")
    assert (expert >= 0).sum() == tokens * experts
    scores = score[: tokens * experts].view(tokens, experts)
    assert_softmax(scores, logits, ids if normalize else None)
    for subroutine in ("nr-f", "up", "down", "balance-f"):
        want = ops.round_tokens(scores, ids, tile, subroutine, None, "torch")
        with poisoned():
            got = ops.round_logits(logits, ids, normalize, tile, subroutine, None, "triton")
            again = ops.round_logits(logits, ids, normalize, tile, subroutine, None, "triton")
        same_bits(dict(enumerate(got)), dict(enumerate(want)))
        same_bits(dict(enumerate(got)), dict(enumerate(again)))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (512, 4096, 8, 16)], ids=str)
def test_gradient_of_the_logits(shape, dtype, normalize):
    tokens, experts, k, tile = shape
    logits = torch.randn(tokens, experts, device="cuda", dtype=dtype)
    ids = ops.topk(logits, k, True, "triton")[1]
    expert, _, score, start, *_ = ops.round_logits(
        logits, ids, normalize, tile, "nr-f", None, "triton"
    )
    given = (torch.randn_like(score), logits, ids if normalize else None, expert, start)
    want = ops.round_logits_backward(*given, "torch")
    with poisoned():
        got = ops.round_logits_backward(*given, "triton")
        again = ops.round_logits_backward(*given, "triton")
    torch.testing.assert_close(got, want)
    assert torch.equal(got, again)


@pytest.mark.parametrize("subroutine", SUBROUTINES)
def test_columns_longer_than_the_registers_hold(subroutine):
    scores = SCORES["tied"](40000, 8, torch.Generator().manual_seed(0)).cuda()
    ids, uniform = top(scores, 2), torch.rand(8, device="cuda")
    want = ops.round_tokens(scores, ids, 128, subroutine, uniform, "torch")
    got = ops.round_tokens(scores, ids, 128, subroutine, uniform, "triton")
    same_bits(dict(enumerate(got)), dict(enumerate(want)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.5, 0.1), (0.0, 1.0)], ids=str)
@pytest.mark.parametrize(
    "shape", [(4096, 64), (16384, 256), (1000, 20), (5, 512), (300, 4096), (1, 1), (0, 8)], ids=str
)
def test_auxiliary_loss(shape, weights, dtype):
    logits = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    counts = torch.randint(100, shape[1:], device="cuda", dtype=torch.int32)
    counts = counts if weights[0] else None
    upstream = torch.randn((), device="cuda")
    found = []
    for _ in range(2):
        with poisoned():
            loss = auxiliary_loss(logits, counts, balance=weights[0], z=weights[1])
            found.append({"loss": loss, "dlogits": torch.autograd.grad(loss, logits, upstream)[0]})
    same_bits(*found)
    (rough, drough), (exact, dexact) = (
        written_out_loss(logits.detach().to(wide), counts, *weights, upstream.to(wide))
        for wide in (torch.float32, torch.float64)
    )
    budget(found[0]["loss"].detach(), rough, exact, name="loss", tokens=shape[0])
    budget(found[0]["dlogits"], drough.to(dtype), dexact, name="dlogits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(4096, 256, 8, 8, 4), (1000, 60, 6, 5, 3), (5000, 384, 8, 1, 1), (3, 4, 2, 4, 2)],
    ids=str,
)
def test_sigmoid(shape, normalize, dtype):
    tokens, experts, k, groups, kept = shape
    logits = torch.randn(tokens, experts, device="cuda").to(dtype)
    bias = torch.randn(experts, device="cuda") / 10
    given = (logits, bias, k, groups, kept, normalize, 2.5)
    with poisoned():
        got, again = (ops.sigmoid_topk(*given, "triton") for _ in range(2))
    same_bits(dict(enumerate(got)), dict(enumerate(again)))
    scores, affinity, ids = got
    # Sums of a sigmoid and a bias that are one rounding apart may change places.
    ranking = logits.double().sigmoid() + bias
    wanted = ops.sigmoid_topk(*given, "torch")[2]
    torch.testing.assert_close(
        ranking.gather(1, ids.long()), ranking.gather(1, wanted.long()), rtol=0, atol=1e-6
    )  # fmt: skip

    def plain(wide):
        """Scores of the choice that was made, and the gradient of the logits."""
        leaf = logits.to(wide).requires_grad_()
        of_choice = leaf.gather(1, ids.long()).sigmoid()
        total = of_choice.sum(-1, keepdim=True) if normalize else 1
        result = 2.5 * of_choice / total
        return result.detach(), torch.autograd.grad(result, leaf, dscores.to(wide))[0]

    dscores = torch.randn_like(scores)
    (rough, drough), (exact, dexact) = plain(torch.float32), plain(torch.float64)
    budget(scores, rough, exact, name="scores")
    back = (dscores, affinity, ids, logits, normalize, 2.5)
    with poisoned():
        found, twice = (ops.sigmoid_topk_backward(*back, "triton") for _ in range(2))
    assert torch.equal(found, twice)
    budget(found, drough.to(dtype), dexact, name="dlogits")
    assert torch.equal(ops.count(ids, experts, "triton"), ops.count(ids, experts, "torch"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_in_fp32(dtype):
    """Of data in 16 bits, without a copy of it in fp32."""
    x = torch.randn(3000, 512, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(24, 512, device="cuda") / 22).to(dtype).requires_grad_()
    router_logits(x, weight, fp32_logits=True)  # the first GEMM of a process asks for a work space
    before = torch.cuda.memory_allocated()
    logits, same = router_logits(x, weight, fp32_logits=True)
    assert torch.cuda.memory_allocated() - before < 4 * 3000 * 32 + 2**16
    assert logits.dtype == torch.float32 and torch.equal(same, x)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = F.linear(*leaves)
    budget(logits.detach(), F.linear(x.float(), weight.float()).detach(), exact.detach())
    upstream = torch.randn_like(logits)
    narrow = torch.autograd.grad(F.linear(x, weight), (x, weight), upstream.to(dtype))
    wide = torch.autograd.grad(exact, leaves, upstream.double())
    found = torch.autograd.grad(logits, (x, weight), upstream)
    for got, plain, true in zip(found, narrow, wide, strict=True):
        budget(got, plain, true)


def layer(name: str) -> MoE:
    small = TokenRounding(16, 4, subroutine="sr-f") if name == "token_rounding" else name
    return MoE(16, 4, 512, 256, router=small).to("cuda", torch.bfloat16)


def step(moe, x):
    out, aux = moe(x)
    grads = torch.autograd.grad(out.float().square().sum() + aux, [x, *moe.parameters()])
    return [out, aux, *grads]


@pytest.mark.parametrize("name", ROUTERS)
def test_never_waits_for_the_device(name):
    moe = layer(name)
    x = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    step(moe, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(moe, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["sigmoid", "expert_choice", "token_rounding"])
def test_cuda_graph_follows_new_inputs(name):
    """Random numbers too: each replay draws its own."""
    moe = layer(name)
    x = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(moe, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(moe, x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    torch.manual_seed(7)
    graph.replay()
    got = [t.clone() for t in captured]
    torch.manual_seed(7)
    for mine, want in zip(got, step(moe, x), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.parametrize("name", ROUTERS)
def test_backends_agree(name):
    logits = torch.randn(3000, 64, device="cuda", requires_grad=True)
    router, found = make_router(name, 64, 4).to("cuda"), []
    for backend in ("torch", "triton"):
        r = router(logits, backend=backend)
        upstream = torch.linspace(0, 1, r.scores.numel(), device="cuda").view_as(r.scores)
        found.append((r.ids, r.scores, *torch.autograd.grad(r.scores, logits, upstream)))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
