"""The trainer's kernels, the loss of the head and AdamW in bfloat16, against fp64 and PyTorch."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from devices import on
from torch import nn

from sonicmoe_trainer import adamw
from sonicmoe_trainer.cross_entropy import linear_cross_entropy
from sonicmoe_trainer.kernels.adamw import adamw_kernel
from sonicmoe_trainer.kernels.cross_entropy import cross_entropy_kernel

CUDA = "cuda"


@on("interpreter")
@pytest.mark.parametrize("divisor", [None, 1.0, 37.5, 1e20])
@pytest.mark.parametrize("count", [5, 200])
def test_bits_of_adamw(count, divisor):
    w, g, m = (torch.randn(count).bfloat16() for _ in range(3))
    v = torch.rand(count).bfloat16()
    w[0], w[1], g[2], g[3] = torch.inf, 0, torch.nan, 1e30
    numbers = (1e-2, 0.999, 0.9, 0.95, 0.1, 0.05, 1e-8)
    given = [t.clone() for t in (w, g, m, v)]
    divisor = None if divisor is None else torch.tensor(divisor)
    adamw_kernel[(-(-count // 64),)](
        *given, w if divisor is None else divisor, count,
        123456789, *numbers, DIVIDE=divisor is not None, BLOCK=64,
    )  # fmt: skip
    adamw.update(w, g, m, v, 123456789, *numbers, divisor)
    # The interpreter computes some of the products in another order: bits of 99%, the rest nearby.
    for got, want in zip(given, (w, g, m, v), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        same = (got == want) | got.isnan()
        assert same.float().mean() >= 0.97
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0, equal_nan=True)


@on("interpreter")
def test_adamw_rounds_what_fp64_gives_up_or_down_in_proportion():
    count, lr, decay, beta1, beta2, eps = 5000, 0.05, 0.9, 0.8, 0.9, 0.1
    w, g, m = (torch.randn(count).bfloat16() for _ in range(3))
    v = torch.rand(count).bfloat16()
    w64, g64, m64, v64 = (t.double() for t in (w, g, m, v))
    g64 = g64 / 2.5
    m64 = beta1 * m64 + (1 - beta1) * g64
    v64 = beta2 * v64 + (1 - beta2) * g64**2
    w64 = w64 * decay - lr * (m64 / 0.36) / ((v64 / 0.19).sqrt() + eps)
    adamw_kernel[(5,)](
        w, g, m, v, torch.tensor(2.5), count, 123456789, lr, decay, beta1,
        beta2, 0.36, 0.19, eps, DIVIDE=True, BLOCK=1024,
    )  # fmt: skip
    errors = []
    for got, exact in ((w, w64), (m, m64), (v, v64)):
        assert ((got >= 0) == (exact >= 0)).all()
        steps = (got.double().abs() - exact.abs()) / torch.exp2(exact.abs().log2().floor() - 7)
        assert steps.abs().max() < 1.01
        assert abs(steps.mean()) < 0.03
        # To the nearest it would be no element, by the toss of a coin half of them.
        assert 0.22 < (steps.abs() > 0.5).double().mean() < 0.28
        errors.append(steps)
    for one, other in itertools.combinations(errors, 2):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.06


@on("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 31, 64, 200])
def test_losses_of_rows(size, dtype):
    logits = (8 * torch.randn(5, size)).to(dtype)
    logits[1] *= 1000
    targets = torch.randint(size, (5,))
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, targets, reduction="none")
    losses.sum().backward()
    limit = 4 * torch.finfo(torch.float32).eps * exact.detach().abs().amax(1, keepdim=True)
    for gradient in (False, True):
        given, got = logits.clone(), torch.full((5,), torch.nan)
        cross_entropy_kernel[(5,)](
            given, targets, got, 5, given.stride(0),
            V=size, GRADIENT=gradient, BLOCK=64,
        )  # fmt: skip
        assert ((got - losses).abs() <= limit[:, 0]).all()
        if gradient:
            rounding = torch.finfo(dtype).eps * exact.grad.abs()
            assert ((given - exact.grad).abs() <= limit + rounding).all()
        else:
            assert torch.equal(given, logits)


# --- on a GPU -------------------------------------------------------------------------------------
@on("cuda")
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1000, 50304])
def test_cross_entropy(size, weight_dtype):
    x = torch.randn(3000, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(size, 256, device=CUDA) / 16).to(weight_dtype).requires_grad_()
    targets = torch.randint(size, (6000,), device=CUDA)[::2]
    with torch.autocast(CUDA, torch.bfloat16, enabled=weight_dtype != torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, 1024)
    found = [loss.detach(), *torch.autograd.grad(0.3 * loss, (x, weight))]
    exact = [t.detach().bfloat16().double().requires_grad_() for t in (x, weight)]
    want = F.cross_entropy(F.linear(*exact), targets)
    wanted = [want.detach(), *torch.autograd.grad(0.3 * want, exact)]
    for got, right in zip(found, wanted, strict=True):
        assert (got.double() - right).norm() <= 0.01 * right.norm()
    assert found[2].dtype == weight_dtype


@on("cuda")
@pytest.mark.parametrize("divisor", [None, 37.5])
def test_adamw(divisor):
    count = 5000
    tensors = [torch.randn(count).bfloat16() for _ in range(3)] + [torch.rand(count).bfloat16()]
    tensors[0][0], tensors[1][1] = torch.inf, torch.nan
    there = [t.to(CUDA) for t in tensors]
    numbers = (123456789, 1e-2, 0.999, 0.9, 0.95, 0.1, 0.05, 1e-8)
    for given in (tensors, there):
        scale = None if divisor is None else torch.tensor(divisor, device=given[0].device)
        adamw.update(*given, *numbers, scale)
    for here, got in zip(tensors, there, strict=True):
        got = got.cpu()
        torch.testing.assert_close(got, here, rtol=2**-7, atol=0, equal_nan=True)
        assert ((got == here) | here.isnan()).float().mean() > 0.97  # the same noise


@on("cuda")
def test_adamw_repeats():
    def trained():
        weight = nn.Parameter(torch.ones(300, 70, device=CUDA).bfloat16())
        optimizer = adamw.StochasticAdamW([weight], lr=1e-5, weight_decay=0.0)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight

    weight = trained()
    assert torch.equal(weight, trained())
    assert weight.float().mean().item() == pytest.approx(1 - 1e-3, abs=1e-4)
