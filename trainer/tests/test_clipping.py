"""Clipped updates: the norm of all gradients, and optimizers that divide by it."""

import math
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, laid_out
from torch import nn

from sonicmoe_trainer import adamw, optim
from sonicmoe_trainer.adamw import StochasticAdamW

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
KINDS = {
    "fp32": (torch.float32, lambda p: torch.optim.AdamW(p, **OPTIONS, fused=True)),
    "bf16": (torch.bfloat16, lambda p: StochasticAdamW(p, **OPTIONS)),
}


def model(dtype, outliers=False, seed=0) -> Any:
    """Two matrices, a scale and a weight that got no gradient."""
    torch.manual_seed(seed)
    made: Any = nn.Module()
    for name, shape in (("a", (40, 30)), ("b", (30, 50)), ("c", (30,)), ("frozen", (3,))):
        p = nn.Parameter(torch.randn(shape).to(dtype))
        if name != "frozen":
            p.grad = torch.randn(shape).to(dtype)
            if outliers:
                p.grad.view(-1)[::7] *= 1000
                p.grad.view(-1)[1::7] *= 1e-4
        setattr(made, name, p)
    return made


def exact_norm(made):
    gradients = [p.grad.double().flatten() for p in made.parameters() if p.grad is not None]
    return torch.cat(gradients).norm().item()


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_is_that_of_fp64(kind, outliers):
    dtype, make = KINDS[kind]
    made = model(dtype, outliers)
    wanted = exact_norm(made)
    norm = optim.step(made, make(made.parameters()), 1.0)
    assert norm.item() == pytest.approx(wanted, rel=1e-5)
    assert all(p.grad is None for p in made.parameters())


@pytest.mark.parametrize("clip", [math.inf, 1e4, 10.0, 1e-3])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_moments_and_weights_are_those_of_clipped_gradients_in_fp64(kind, outliers, clip):
    dtype, make = KINDS[kind]
    made = model(dtype, outliers)
    share = min(1.0, clip / exact_norm(made))
    before = {name: p.detach().double() for name, p in made.named_parameters()}
    clipped = {n: p.grad.double() * share for n, p in made.named_parameters() if p.grad is not None}
    optimizer = make(made.parameters())
    optim.step(made, optimizer, clip)
    limit = 2e-6 if dtype == torch.float32 else 2**-7  # of norm, quotient and products
    for name, p in made.named_parameters():
        if name == "frozen":
            assert torch.equal(p.double(), before[name])
            continue
        g, state = clipped[name], optimizer.state[p]
        torch.testing.assert_close(state["exp_avg"].double(), 0.1 * g, rtol=limit, atol=1e-30)
        squares = state["exp_avg_sq"].double()
        torch.testing.assert_close(squares, 0.05 * g * g, rtol=limit, atol=1e-30)
        wanted = before[name] * (1 - 1e-4) - 1e-3 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(p.detach().double(), wanted, rtol=limit, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_that_is_not_finite_is_returned(kind):
    dtype, make = KINDS[kind]
    made = model(dtype)
    made.a.grad[0, 0] = math.nan
    assert not optim.step(made, make(made.parameters()), 1.0).isfinite()


def test_a_later_step_without_clipping_divides_by_nothing():
    made = model(torch.bfloat16)
    optimizer = StochasticAdamW(made.parameters(), **OPTIONS)
    optim.step(made, optimizer, 1e-3)
    made.a.grad = torch.ones_like(made.a)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    optim.step(made, optimizer, math.inf)
    moment = optimizer.state[made.a]["exp_avg"].float()
    steps = (moment - 0.1) / 2**-11  # rounded up or down, in proportion
    assert steps.abs().max() < 1 and abs(steps.mean()) < 0.05


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_gradients(layout):
    made = model(torch.bfloat16, outliers=True)
    w, g = made.a.detach(), made.a.grad
    view = laid_out(g, layout)
    g = g if view is None else view.detach()
    numbers = (7, 1e-2, 0.999, 0.9, 0.95, 0.1, 0.05, 1e-8)
    found = []
    for gradient in (g, g.clone(memory_format=torch.contiguous_format)):
        state = [w.clone(), gradient, torch.zeros_like(w), torch.zeros_like(w)]
        adamw.update(*state, *numbers, torch.tensor(2.5))
        found.append((state[0], state[2], state[3]))
    assert all(map(torch.equal, *found))
