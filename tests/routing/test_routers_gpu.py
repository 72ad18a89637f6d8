"""Routers on a GPU: the plain result, bitwise the same twice, no synchronisation, CUDA graphs."""

import pytest
import torch
from helpers import poisoned, same_bits
from score_matrices import SCORES, top

from sonicmoe import MoE, ops
from sonicmoe.reference.token_rounding import SUBROUTINES
from sonicmoe.routing import ROUTERS, TokenRounding, make_router

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
