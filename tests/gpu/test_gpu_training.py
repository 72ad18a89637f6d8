"""The trainer's kernels on a GPU: the loss of the head, and AdamW in bfloat16."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sonicmoe.train import adamw
from sonicmoe.train.cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1000, 50304])
def test_cross_entropy(size, weight_dtype):
    x = torch.randn(3000, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(size, 256, device=CUDA) / 16).to(weight_dtype).requires_grad_()
    targets = torch.randint(size, (3000,), device=CUDA)
    with torch.autocast(CUDA, torch.bfloat16, enabled=weight_dtype != torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, 1024)
    found = [loss.detach(), *torch.autograd.grad(0.3 * loss, (x, weight))]
    exact = [t.detach().bfloat16().double().requires_grad_() for t in (x, weight)]
    want = F.cross_entropy(F.linear(*exact), targets)
    wanted = [want.detach(), *torch.autograd.grad(0.3 * want, exact)]
    for got, right in zip(found, wanted, strict=True):
        assert (got.double() - right).norm() <= 0.01 * right.norm()
    assert found[2].dtype == weight_dtype


def test_adamw():
    count = 5000
    tensors = [torch.randn(count).bfloat16() for _ in range(3)] + [torch.rand(count).bfloat16()]
    tensors[0][0], tensors[1][1] = torch.inf, torch.nan
    there = [t.to(CUDA) for t in tensors]
    numbers = (123456789, 1e-2, 0.999, 0.9, 0.95, 0.1, 0.05, 1e-8)
    for given in (tensors, there):
        adamw.update(*given, *numbers)
    for here, got in zip(tensors, there, strict=True):
        got = got.cpu()
        torch.testing.assert_close(got, here, rtol=2**-7, atol=0, equal_nan=True)
        assert ((got == here) | here.isnan()).float().mean() > 0.97  # the same noise


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
