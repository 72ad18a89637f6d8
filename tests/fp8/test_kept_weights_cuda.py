"""Kept FP8 weights on Hopper: CUDA graphs, streams, compiled models, and stale weights."""

from typing import Any

import pytest
import torch
from research.capture import captured
from torch._dynamo.utils import counters

from sonicmoe import MoE
from sonicmoe.launch.quantize import samples_of

pytestmark = pytest.mark.gpu
CUDA = "cuda"
STALE = r"^c_proj\.weight: expected the values it had"


def layers(**options) -> MoE:
    torch.manual_seed(0)
    return MoE(8, 2, 256, 128, precision="fp8", **options).to(CUDA, torch.bfloat16)


def tokens() -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(1)
    return torch.randn(500, 256, device=CUDA, generator=generator).bfloat16()


def fresh(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The output of a layer that quantizes in every call."""
    other = layers()
    other.load_state_dict(moe.state_dict())
    return other(x)[0]


def train(moe: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward; gradients of the parameters are written in place."""
    out, loss = moe(x)
    gradients = torch.autograd.grad(out.float().square().mean() + loss, list(moe.parameters()))
    with torch.no_grad():
        for p, gradient in zip(moe.parameters(), gradients, strict=True):
            p.grad.copy_(gradient)
    return out


def ready(moe: MoE) -> MoE:
    for p in moe.parameters():
        p.grad = torch.zeros_like(p)
    return moe


@pytest.mark.parametrize("fused", [True, False])
def test_a_graph_reads_new_weights_after_a_step(fused):
    x = tokens()
    moe, want = ready(layers(cache_fp8_weights=True)), ready(layers())
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, fused=fused) for m in (moe, want)]
    graph, out = captured(lambda: train(moe, x))
    outs = []
    for _ in range(3):
        graph.replay()
        expected = train(want, x)
        assert torch.equal(out, expected)
        for p, q in zip(moe.parameters(), want.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        outs.append(out.clone())
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    assert torch.equal(moe(x)[0], fresh(moe, x))


def test_a_graph_of_a_whole_step():
    """The step of the optimizer quantizes inside of the graph."""
    x = tokens()
    moe, want = ready(layers(cache_fp8_weights=True)), ready(layers())
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, capturable=True) for m in (moe, want)]

    def step(layer, optimizer):
        out = train(layer, x)
        optimizer.step()
        return out

    graph, out = captured(lambda: step(moe, optimizers[0]))
    for _ in range(2):  # warm-up
        step(want, optimizers[1])
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, step(want, optimizers[1]))
    assert torch.equal(moe(x)[0], fresh(moe, x))


def test_stale_weights_in_a_graph():
    moe, x = layers(cache_fp8_weights=True), tokens()
    with torch.no_grad():
        graph, out = captured(lambda: moe(x)[0])
        graph.replay()
        assert torch.equal(out, fresh(moe, x))
        moe.c_proj.weight.data.mul_(1.5)
        graph.replay()
        assert out.isnan().all()  # also waits
        for _ in range(2):
            with pytest.raises(ValueError, match=STALE):
                moe(x)
        with pytest.raises(ValueError, match=STALE):
            torch.optim.SGD(moe.parameters(), 0.1).step()
        moe.refresh_fp8_weights()
        graph.replay()
        assert torch.equal(out, fresh(moe, x)) and torch.equal(moe(x)[0], out)


def test_each_replay_compares_another_sample():
    moe, x = layers(cache_fp8_weights=True), tokens()
    with torch.no_grad():
        graph, out = captured(lambda: moe(x)[0])
        moe.c_fc.weight.data[0, 5, 7] += 1
        samples = samples_of(*moe.c_fc.weight.shape[1:])
        found = []
        for _ in range(2 * samples):
            graph.replay()
            found.append(out.isnan().any().item())
    assert samples > 1 and sum(found) == 2 and found[:samples] == found[samples:]


def test_capture_needs_quantized_weights():
    x = tokens()
    layers()(x)  # compiles
    moe = layers(cache_fp8_weights=True)
    with (
        pytest.raises(ValueError, match=r"^c_fc\.weight: expected weights whose FP8 copy"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        moe(x)
    moe.refresh_fp8_weights()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x)[0]
    graph.replay()
    assert torch.equal(out, fresh(moe, x))


@pytest.mark.parametrize("name", ["c_fc", "c_proj"])
def test_stale_weights_give_nan_and_then_an_error(name):
    moe, x = layers(cache_fp8_weights=True), tokens().requires_grad_()
    assert torch.equal(moe(x)[0], moe(x)[0])
    getattr(moe, name).weight.data.mul_(1.5)
    out = moe(x)[0]
    dx = torch.autograd.grad(out.sum(), x)[0]
    assert out.isnan().all() and dx.isnan().all()
    with pytest.raises(ValueError, match=rf"^{name}\.weight: expected the values it had"):
        moe(x)
    moe.refresh_fp8_weights()
    assert torch.equal(moe(x)[0], fresh(moe, x))


def test_an_expert_that_is_repaired_unseen():
    moe, x = layers(cache_fp8_weights=True), tokens()
    with torch.no_grad():
        moe.c_proj.weight[1, 2, 3] = torch.nan
    for _ in range(2):
        assert moe(x)[0].isnan().any()
    moe.c_proj.weight.data[1, 2, 3] = 0.01
    assert moe(x)[0].isnan().any()
    with pytest.raises(ValueError, match=STALE):
        moe(x)
    moe.refresh_fp8_weights()
    assert not moe(x)[0].isnan().any()


def test_a_refresh_before_the_device_found_stale_weights():
    moe, x = layers(cache_fp8_weights=True), tokens()
    moe(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    moe.c_proj.weight.data.mul_(1.5)
    out = moe(x)[0]
    moe.refresh_fp8_weights()  # while the device still sleeps
    assert out.isnan().all()
    assert torch.equal(moe(x)[0], fresh(moe, x))


def test_another_stream_waits_for_quantized_weights():
    moe, x = layers(cache_fp8_weights=True), tokens()
    moe(x)
    with torch.no_grad():
        moe.c_fc.weight.mul_(2)
    want = fresh(moe, x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        there = moe(x)[0]  # quantizes
    here = moe(x)[0]
    torch.cuda.synchronize()
    assert torch.equal(there, want) and torch.equal(here, want)


def test_compiled_with_cuda_graphs():
    """`mode="reduce-overhead"` replays graphs, and copies no weights into them."""
    torch._dynamo.reset()
    counters.clear()
    moe, x = ready(layers(cache_fp8_weights=True)), tokens()
    moe.refresh_fp8_weights()
    compiled = torch.compile(moe, mode="reduce-overhead", fullgraph=True)
    optimizer = torch.optim.AdamW(moe.parameters(), 0.01, fused=True)
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        out = train(compiled, x)
        want = fresh(moe, x)
        assert (out - want).norm() <= 0.01 * want.norm()
        optimizer.step()
    assert counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()


def test_nothing_waits_for_the_device():
    moe, x = ready(layers(cache_fp8_weights=True)), tokens()
    optimizer = torch.optim.AdamW(moe.parameters(), 0.01, fused=True)
    for _ in range(2):
        train(moe, x)
        optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(moe, x)
        optimizer.step()
        moe.refresh_fp8_weights()
        train(moe, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(moe(x)[0], fresh(moe, x))


@pytest.mark.parametrize("name", ["c_fc", "c_proj"])
def test_weights_refreshed_before_the_backward_pass_are_an_error(name):
    """Kernels write them, which autograd does not see by itself."""
    moe, x = layers(cache_fp8_weights=True), tokens().requires_grad_()
    moe(x)
    out = moe(x)[0]
    getattr(moe, name).weight.data.mul_(2)
    moe.refresh_fp8_weights()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
