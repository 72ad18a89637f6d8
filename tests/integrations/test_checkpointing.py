"""Activation checkpointing: the same gradients, and as many runs of an operator as promised."""

from collections import Counter

import pytest
import torch
from helpers import same_bits
from torch.utils.checkpoint import checkpoint

from sonicmoe import MoE
from sonicmoe.integrations.checkpointing import FORWARD, save_operators


def step(moe, x, **options):
    moe.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out, aux = checkpoint(moe, x, use_reentrant=False, **options) if options else moe(x)
    (out.square().sum() + aux).backward()
    return {"out": out.detach(), "dx": x.grad, **{n: p.grad for n, p in moe.named_parameters()}}


MOE = MoE(4, 2, 16, 8, add_bias=True)
SHARED = MoE(4, 2, 16, 8, shared_intermediate_size=8, shared_gate=True)
OUTPUT = ("down", "combine")  # the backward pass needs nothing that they return


@pytest.mark.tries("activation checkpointing", "plain")
@pytest.mark.parametrize(
    "moe",
    [MOE, SHARED, MoE(4, 2, 16, 8, router="sigmoid"), MoE(4, 2, 16, 8, router="token_rounding")],
)
def test_plain(runs, moe):
    """Everything runs again but what the output alone needs."""
    x = torch.randn(12, 16)
    want = step(moe, x)
    once = Counter(runs)
    runs.clear()
    same_bits(want, step(moe, x, preserve_rng_state=False))
    assert runs == {n: c if n in OUTPUT else 2 * c for n, c in once.items()}


def test_what_follows_needs_the_output(runs):
    """A square keeps what it squares: there the whole layer runs again."""
    x = torch.randn(12, 16, requires_grad=True)
    grads = []
    for run in (lambda f: f(x), lambda f: checkpoint(f, x, use_reentrant=False)):
        runs.clear()
        out = run(lambda x: MOE(x)[0].square())
        grads.append(torch.autograd.grad(out.sum(), (x, *MOE.parameters())))
    same_bits(dict(enumerate(grads[0])), dict(enumerate(grads[1])))
    assert (runs["down"], runs["combine"]) == (2, 3)  # rows of dX are summed by the same operator


def test_a_residual_block(runs):
    norm = torch.nn.RMSNorm(16)

    def block(x):
        return x + MOE(norm(x).view(3, 4, 16))[0].view(12, 16)

    x = torch.randn(12, 16, requires_grad=True)
    want = torch.autograd.grad(block(x).square().sum(), (x, *MOE.parameters()))
    runs.clear()
    out = checkpoint(block, x, use_reentrant=False)
    got = torch.autograd.grad(out.square().sum(), (x, *MOE.parameters()))
    same_bits(dict(enumerate(want)), dict(enumerate(got)))
    assert runs["up"] == 2 and runs["down"] == 1


def test_a_compiled_checkpoint(runs):
    """What nobody needs is left out of a compiled backward pass by itself."""
    x = torch.randn(12, 16, requires_grad=True)

    def checkpointed(x):
        return checkpoint(MOE, x, use_reentrant=False)

    compiled = torch.compile(checkpointed, backend="aot_eager")
    grads = []
    for run in (checkpointed, compiled, compiled):  # the last one traces nothing
        runs.clear()
        grads.append(torch.autograd.grad(sum(t.sum() for t in run(x)), (x, *MOE.parameters())))
        if run is checkpointed:
            eager = Counter(runs)
    same_bits(dict(enumerate(grads[0])), dict(enumerate(grads[-1])))
    if torch.__version__.startswith("2.11."):  # it keeps what nodes of Python's return
        eager.subtract(("topk", "up", "balance"))
    assert runs == eager and runs["down"] == 1


def test_kept_tensors_may_be_elsewhere(runs):
    x = torch.randn(12, 16)
    want = step(MOE, x)
    with torch.autograd.graph.save_on_cpu():
        same_bits(want, step(MOE, x))


def test_no_gradient_in_a_checkpoint():
    moe = MoE(4, 2, 16, 8).requires_grad_(False)
    x = torch.randn(12, 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        same_bits({"out": moe(x)[0]}, {"out": moe(x, is_inference_mode=True)[0]})


@pytest.mark.tries("activation checkpointing", "selective; how often each operator runs")
@pytest.mark.parametrize("names", [(), ("up",), ("topk", "permute"), ("up", "down")])
def test_saved_operators_run_once(runs, names):
    x = torch.randn(12, 16)
    want = step(MOE, x)
    once = Counter(runs)
    runs.clear()
    same_bits(want, step(MOE, x, context_fn=save_operators(*names)))
    for name in once:
        again = name not in (*OUTPUT, *(names or FORWARD))
        assert runs[name] == once[name] * (1 + again), name


def test_unknown_operator_raises():
    with pytest.raises(
        ValueError, match=r"names: expected operators among topk.*got 'up_backward'"
    ):
        save_operators("up_backward")
    with pytest.raises(ValueError, match=r"got 'combine'\. It is part of 'down' now"):
        save_operators("combine")
