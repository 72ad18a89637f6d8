"""Kernels of routers against fp64 and plain PyTorch; on a GPU no synchronisation, CUDA graphs."""

import pytest
import torch
import torch.nn.functional as F
from devices import on, values_on
from helpers import DTYPES, budget, poisoned, run_poisoned, same_bits, written_out_loss

from sonicmoe import MoE, ops
from sonicmoe.launch import routing as launch_routing
from sonicmoe.reference import routers
from sonicmoe.routing import ROUTERS, Sigmoid, TokenRounding, auxiliary_loss, make_router
from sonicmoe.routing.scores import router_logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@values_on(
    "tokens, experts, weights",
    interpreter=[
        (200, 5, (0.5, 0.1)),  # more tokens than all programs take at once, E no power of two
        (6, 4096, (1.0, 0.0)),  # more programs than are added up at once
        (3, 300, (0.0, 1.0)),
        (2, 1, (1.0, 0.0)),
        (0, 4, (0.5, 0.1)),
    ],
    cuda=[
        (*shape, weights)
        for shape in [
            (4096, 64), (16384, 256), (1000, 20), (5, 512), (300, 4096), (1, 1), (0, 8)
        ]
        for weights in [(1.0, 0.0), (0.5, 0.1), (0.0, 1.0)]
    ],
)  # fmt: skip
def test_auxiliary_loss(dtype, tokens, experts, weights, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(launch_routing, "_SUMS", 6)
    logits = torch.randn(tokens, experts, device=device).to(dtype).requires_grad_()
    counts = torch.randint(100, (experts,), dtype=torch.int32, device=device)
    counts = counts if weights[0] else None
    upstream = torch.randn((), device=device)

    def step():
        loss = auxiliary_loss(
            logits, counts, balance=weights[0], z=weights[1], backend="triton"
        )  # fmt: skip
        return {"loss": loss, "dlogits": torch.autograd.grad(loss, logits, upstream)[0]}

    got = run_poisoned(step, device)
    (rough, drough), (exact, dexact) = (
        written_out_loss(logits.detach().to(wide), counts, *weights, upstream.to(wide))
        for wide in (torch.float32, torch.float64)
    )
    budget(got["loss"].detach(), rough, exact, name="loss", tokens=tokens)
    budget(got["dlogits"], drough.to(dtype), dexact, name="dlogits")


@on("interpreter")
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
def test_router_of_sigmoids(dtype, normalize, tokens, experts, k, groups, kept):
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


@on("cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(4096, 256, 8, 8, 4), (1000, 60, 6, 5, 3), (5000, 384, 8, 1, 1), (3, 4, 2, 4, 2)],
    ids=str,
)
def test_operators_of_sigmoids(shape, normalize, dtype):
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


@on("cuda")
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


@on("cuda")
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


@on("cuda")
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


@on("cuda")
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
