"""Activation checkpointing: the same gradients, and as many runs of an operator as promised."""

from collections import Counter

import pytest
import torch
from helpers import same_bits
from torch.utils.checkpoint import checkpoint

from sonicmoe import MoE
from sonicmoe.integrations.checkpointing import FORWARD, save_operators
from sonicmoe.reference import products, routing


@pytest.fixture
def runs(monkeypatch):
    """How often each operator was really computed."""
    counted: Counter = Counter()
    for module, names in (
        (routing, ("topk", "balance", "permute")),
        (products, ("up", "down", "aggregate")),
    ):
        for name in names:
            original = getattr(module, name)

            def run(*args, _original=original, _name=name):
                counted[_name] += 1
                return _original(*args)

            monkeypatch.setattr(module, name, run)
    return counted


def step(moe, x, **options):
    moe.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out, aux = checkpoint(moe, x, use_reentrant=False, **options) if options else moe(x)
    (out.square().sum() + aux).backward()
    return {"out": out.detach(), "dx": x.grad, **{n: p.grad for n, p in moe.named_parameters()}}


MOE = MoE(4, 2, 16, 8, add_bias=True)
BACKWARD = {"aggregate": 1}  # the backward pass sums the rows of dX with the same operator


@pytest.mark.tries("activation checkpointing", "plain")
def test_plain(runs):
    x = torch.randn(12, 16)
    want = step(MOE, x)
    once = Counter(runs)
    runs.clear()
    same_bits(want, step(MOE, x, preserve_rng_state=False))
    assert runs == Counter(
        {n: 2 * (c - BACKWARD.get(n, 0)) + BACKWARD.get(n, 0) for n, c in once.items()}
    )


@pytest.mark.tries("activation checkpointing", "selective; how often each operator runs")
@pytest.mark.parametrize("names", [(), ("up",), ("topk", "permute"), ("up", "down", "aggregate")])
def test_saved_operators_run_once(runs, names):
    x = torch.randn(12, 16)
    want = step(MOE, x)
    once = Counter(runs)
    runs.clear()
    same_bits(want, step(MOE, x, context_fn=save_operators(*names)))
    for name in once:
        again = 0 if name in (names or FORWARD) else once[name] - BACKWARD.get(name, 0)
        assert runs[name] == once[name] + again, name


def test_unknown_operator_raises():
    with pytest.raises(
        ValueError, match=r"names: expected operators among topk.*got 'up_backward'"
    ):
        save_operators("up_backward")
