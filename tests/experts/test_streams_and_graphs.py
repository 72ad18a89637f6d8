"""On a GPU: no synchronisation, CUDA graphs, compilation, streams, threads."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers import Case, make_inputs, ours, poisoned, run, same_bits
from research.capture import captured
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import sonicmoe
from sonicmoe import KernelBackendMoE, MoE, ops
from sonicmoe.launch import grouped_gemm
from sonicmoe.tensors import NO_LORA, Permutation, Weight
from sonicmoe.tuning import tile_m

pytestmark = pytest.mark.gpu
CASE = Case("3000,512,256,16,4", bias=True, routing="dropped")


@pytest.fixture
def no_synchronisation():
    """Anything that makes the host wait for the device is an error inside the block."""

    class Block:
        def __enter__(self):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    return Block()


def _layer(**options) -> MoE:
    return MoE(16, 4, 512, 256, add_bias=True, **options).to("cuda", torch.bfloat16)


def test_topk_and_permutation_are_bitwise_the_same_every_time():
    moe, x = _layer(), torch.randn(8000, 512, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()

    def once():
        out, _ = moe(x)
        grads = torch.autograd.grad(out, [x, *moe.parameters()], torch.ones_like(out))
        return dict(enumerate([out.detach(), *grads]))

    first = once()
    for _ in range(3):
        same_bits(first, once())


def test_experts_never_wait_for_the_device(no_synchronisation):
    given = make_inputs(CASE, "cuda")
    want = run(ours(CASE, "triton"), given)
    with no_synchronisation:
        got = run(ours(CASE, "triton"), given)
    same_bits(want, got)


@pytest.mark.parametrize(
    "router", ["softmax_over_topk", "topk_over_softmax", "topk_over_softmax_normalized"]
)
def test_the_module_never_waits_for_the_device(router, no_synchronisation):
    moe = _layer(router=router, z_loss_coef=0.1)
    x = torch.randn(2, 700, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        out, aux = moe(x, kernel_backend_moe=KernelBackendMoE.sonicmoe)
        (out.sum() + aux).backward()

    step()
    with no_synchronisation:
        step()


def test_the_other_entries_never_wait_for_the_device(no_synchronisation):
    given = make_inputs(CASE, "cuda")
    weights = [given.w1, given.w2, given.b1, given.b2]
    for t in (given.x, *weights):
        t.requires_grad_()
    counts = torch.full((16,), 100, device="cuda")
    token = torch.randint(3000, (5000,), device="cuda", dtype=torch.int32)
    expert = torch.randint(16, (5000,), device="cuda", dtype=torch.int32)
    scores = torch.rand(5000, device="cuda", requires_grad=True)
    router = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
    w1, w2 = given.w1.permute(1, 2, 0), given.w2.permute(1, 2, 0)

    def step():
        sonicmoe.grouped_experts(given.x, counts, *weights).sum().backward()
        sonicmoe.moe_general_routing_inputs(
            given.x, scores, token, expert, w1, given.b1, w2, given.b2, 16, None
        )[0].sum().backward()
        sonicmoe.moe_TC_softmax_topk_layer(
            given.x, router, w1, given.b1, w2, given.b2, 4, None
        )[0].sum().backward()  # fmt: skip

    step()
    with no_synchronisation:
        step()


@pytest.mark.parametrize("router", ["softmax_over_topk", "sigmoid", "token_rounding"])
def test_a_checkpoint_waits_for_nothing_and_gives_the_same_bits(router, no_synchronisation):
    moe = _layer(router=router)
    x = torch.randn(3000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)

    def step(layer):
        with poisoned():
            out, aux = layer(x)
            wrt = [x, *moe.parameters()]
            grads = torch.autograd.grad([out, aux], wrt, [dout, torch.ones_like(aux)])
        return dict(enumerate([out.detach(), aux.detach(), *grads]))

    checkpointed = partial(checkpoint, moe, use_reentrant=False, preserve_rng_state=False)
    want, _ = step(moe), step(checkpointed)
    with no_synchronisation:
        got = step(checkpointed)
    same_bits(want, got)


def test_cuda_graph_of_forward_and_backward_follows_new_inputs():
    moe = _layer(router="topk_over_softmax")
    x = torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    wrt = [x, *moe.parameters()]

    def step():
        out, aux = moe(x)
        return [out, aux, *torch.autograd.grad([out, aux], wrt, [dout, torch.ones_like(aux)])]

    graph, held = captured(step)

    for seed in (1, 2):  # another choice of experts each time, the same graph
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            dout.copy_(torch.randn_like(dout))
        graph.replay()
        got = dict(enumerate(t.detach().clone() for t in held))
        want = dict(enumerate(t.detach() for t in step()))
        same_bits(got, want)


def test_a_captured_module_follows_new_inputs_and_new_weights():
    moe = _layer()
    eager = copy.deepcopy(moe)
    x = torch.randn(4, 250, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    captured = torch.cuda.make_graphed_callables(moe, (x,))
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn_like(x).requires_grad_()
        dout = torch.randn_like(x)
        with torch.no_grad():
            for mine, theirs in zip(moe.parameters(), eager.parameters(), strict=True):
                mine.add_(torch.randn_like(mine), alpha=0.1)
                theirs.copy_(mine)
        same_bits(_gradients(captured, x, dout), _gradients(eager, x, dout))


def _gradients(layer, x, dout):
    out, aux = layer(x)
    wrt = [x, *layer.parameters()]
    grads = torch.autograd.grad([out, aux], wrt, [dout, torch.ones_like(aux)])
    return {i: t.detach().clone() for i, t in enumerate([out, aux, *grads])}


@pytest.mark.parametrize("router", ["softmax_over_topk", "token_rounding"])
def test_compiled_with_reduced_overhead(router):
    """PyTorch captures all of it: the first call warms up, the second is captured."""
    torch._dynamo.reset()
    counters.clear()
    moe = MoE(8, 2, 128, 64, router=router).to("cuda", torch.bfloat16)
    compiled = torch.compile(moe, mode="reduce-overhead", fullgraph=True)
    for _ in range(6):
        x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dout = torch.randn_like(x)
        torch.compiler.cudagraph_mark_step_begin()
        same_bits(_gradients(compiled, x, dout), _gradients(moe, x, dout))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_compiled_without_a_graph_break_for_changing_tokens():
    torch._dynamo.reset()
    moe = _layer()
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    for tokens in (300, 500, 7):
        x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        results = []
        for f in (moe, compiled):
            out, aux = f(x)
            results.append([out, *torch.autograd.grad(out.float().square().sum() + aux, [x])])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_compiled_copies_no_tensor():
    """A compiled `addmm_` copied dX before the router's share was added to it."""
    torch._dynamo.reset()
    moe = _layer()
    compiled = torch.compile(moe, fullgraph=True)
    x = torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        out, aux = compiled(x)
        upstream = [torch.ones_like(out), torch.ones_like(aux)]
        torch.autograd.grad([out, aux], [x, *moe.parameters()], upstream)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    assert any("hopper" in name for name in names)
    assert not [name for name in names if name.startswith("Memcpy DtoD")]


def test_the_next_stream_is_honoured():
    """On a side stream that a long kernel holds up, results wait for their inputs."""
    given = make_inputs(CASE, "cuda")
    want = run(ours(CASE, "triton"), given)
    late = make_inputs(CASE, "cuda")
    x = late.x.clone()
    late.x.fill_(float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.x.copy_(x)
        got = run(ours(CASE, "triton"), late)
    side.synchronize()
    same_bits(want, got)


@pytest.mark.parametrize("router", ["softmax_over_topk", "sigmoid", "token_rounding"])
def test_cached_launches_on_another_stream(router):
    """The same bits, in poisoned memory."""
    moe = _layer(router=router)
    x = torch.randn(1500, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    step = partial(_gradients, moe, x, torch.randn_like(x))
    want = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), poisoned():
        got = step()
    side.synchronize()
    same_bits(want, got)


def test_a_thread_that_has_not_called_cuda_yet():
    """Autograd's thread may begin with a descriptor, which the driver makes only in a context."""
    a = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    start = torch.tensor([0, 100, 256], device="cuda", dtype=torch.int32)
    m = tile_m(a.dtype.itemsize)
    _, tiles = ops.tiles(start, 256, m, "triton")
    p = Permutation.of_sorted_rows(start, tiles, m)

    def down():
        return grouped_gemm.down(a, Weight(w2), None, None, NO_LORA, p)

    want = down().clone()  # compiled here, and memory to take again
    with ThreadPoolExecutor(1) as other:
        got = other.submit(down).result()
    assert torch.equal(got, want)
