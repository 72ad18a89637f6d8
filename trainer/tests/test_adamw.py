"""AdamW on weights in bfloat16."""

import pytest
import torch
from torch import nn

from sonicmoe_trainer import adamw
from sonicmoe_trainer.adamw import StochasticAdamW, hashed, key_of, rounded_stochastically

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _weights(seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(64, 96, generator=generator).bfloat16())


def test_one_step_is_that_of_pytorch_in_fp32_but_for_the_rounding():
    weight = _weights()
    exact = nn.Parameter(weight.detach().float())
    mine, theirs = StochasticAdamW([weight], **OPTIONS), torch.optim.AdamW([exact], **OPTIONS)
    for seed in range(3):
        exact.data.copy_(weight.detach())
        gradient = _weights(seed + 1).detach()
        for state in mine.state.values():  # PyTorch goes on with the rounded moments
            for name in ("exp_avg", "exp_avg_sq"):
                theirs.state[exact][name].copy_(state[name])
        weight.grad, exact.grad = gradient, gradient.float()
        mine.step()
        theirs.step()
        step = torch.finfo(torch.bfloat16).eps * exact.abs()
        assert ((weight - exact).abs() <= 1.01 * step).all()
        assert (weight == exact.bfloat16()).float().mean() < 0.95  # not to the nearest


def test_updates_that_rounding_to_the_nearest_loses_arrive():
    weights = {kind: nn.Parameter(torch.ones(4096).bfloat16()) for kind in ("mine", "nearest")}
    options = {"lr": 1e-5, "weight_decay": 0.0}
    optimizers = [StochasticAdamW([weights["mine"]], **options),
                  torch.optim.AdamW([weights["nearest"]], **options)]  # fmt: skip
    for _ in range(100):
        for weight, optimizer in zip(weights.values(), optimizers, strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert (weights["nearest"] == 1).all()
    # 100 steps of 1e-5; one weight scatters by sqrt(100 · 1e-5 · 2⁻⁸), their mean by 1/64 of that.
    assert weights["mine"].mean(dtype=torch.float32).item() == pytest.approx(1 - 1e-3, abs=1.5e-4)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_moments_follow_gradients_that_shrink(beta2):
    """After a burst, the second moment decays by less than rounding to the nearest keeps."""
    weight = nn.Parameter(torch.ones(4096).bfloat16())
    optimizer = StochasticAdamW([weight], lr=1e-5, betas=(0.995, beta2))
    m = v = 0.0
    for step in range(400):
        g = 8.0 if step < 4 else 0.25
        weight.grad = torch.full_like(weight, g)
        optimizer.step()
        m, v = 0.995 * m + 0.005 * g, beta2 * v + (1 - beta2) * g * g
    for name, want in (("exp_avg", m), ("exp_avg_sq", v)):
        mean = optimizer.state[weight][name].mean(dtype=torch.float32).item()
        assert mean == pytest.approx(want, rel=0.01)


def test_autograd_sees_the_update(monkeypatch):
    """Kernels write without it, as `.data` does."""
    monkeypatch.setattr(adamw, "update", lambda w, *others: w.data.add_(1))
    weight = _weights()
    product = weight * weight
    weight.grad = _weights(1).detach()
    StochasticAdamW([weight], **OPTIONS).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_run_repeats_and_goes_on_from_its_state():
    def steps(optimizer, weight, which):
        for seed in which:
            weight.grad = _weights(seed + 1).detach()
            optimizer.step()

    weight = _weights()
    optimizer = StochasticAdamW([weight], **OPTIONS, seed=5)
    steps(optimizer, weight, range(4))
    state, after_two = {}, _weights()
    for part in (range(2), range(2, 4)):
        again = StochasticAdamW([after_two], **OPTIONS, seed=5)
        if state:
            again.load_state_dict(state)
        steps(again, after_two, part)
        state = again.state_dict()
    assert torch.equal(weight, after_two)
    other = _weights()
    steps(StochasticAdamW([other], **OPTIONS, seed=6), other, range(4))
    assert not torch.equal(weight, other)


def test_rounding_is_right_on_average_and_keeps_what_is_exact():
    value = torch.tensor([1 + 2**-9, -(1 + 2**-9), 1.0, -0.0, 3e38, 1e-40, torch.inf, -torch.inf])
    noise = torch.arange(0, 2**16, 64)[:, None].expand(-1, len(value))
    rounded = rounded_stochastically(value.expand(noise.shape).contiguous(), noise).double()
    finite = value.isfinite()
    assert rounded.mean(0)[finite].tolist() == pytest.approx(
        value.double()[finite].tolist(), rel=1e-4
    )
    assert (rounded[:, ~finite] == value[~finite].double()).all()
    assert rounded_stochastically(torch.full((1,), torch.nan), noise[-1:, 0]).isnan().all()


def test_noise_is_even_and_differs_between_steps_and_parameters():
    i = torch.arange(2**16)
    bits = [hashed(i, key_of(0, step, place)) & 0xFFFF for step, place in ((1, 1), (2, 1), (1, 2))]
    for noise in bits:
        assert noise.double().mean() / 2**16 == pytest.approx(0.5, abs=0.01)
        share = torch.histc(noise.double(), 16) / len(i)
        assert ((share - 1 / 16).abs() < 0.01).all()
    for one, other in ((0, 1), (0, 2), (1, 2)):
        both = torch.corrcoef(torch.stack([bits[one], bits[other]]).double())
        assert abs(both[0, 1]) < 0.02


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"params.*bfloat16.*float32.*torch.optim.AdamW"):
        StochasticAdamW([nn.Parameter(torch.zeros(3))], lr=1e-3)
