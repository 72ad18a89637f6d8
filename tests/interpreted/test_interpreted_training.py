"""The kernels of the trainer: bits of the plain PyTorch that runs without a GPU."""

import pytest
import torch

from sonicmoe.kernels.adamw import adamw_kernel
from sonicmoe.kernels.cross_entropy import cross_entropy_kernel
from sonicmoe.launch.launcher import launch
from sonicmoe.train import adamw
from sonicmoe.train.cross_entropy import _losses


@pytest.mark.parametrize("count", [5, 64, 200])
def test_adamw(count):
    w, g, m = (torch.randn(count).bfloat16() for _ in range(3))
    v = torch.rand(count).bfloat16()
    w[0], w[1], g[2], g[3] = torch.inf, 0, torch.nan, 1e30
    numbers = (1e-2, 0.999, 0.9, 0.95, 0.1, 0.05, 1e-8)
    given = [t.clone() for t in (w, g, m, v)]
    launch(adamw_kernel, (-(-count // 64),), *given, count, 123456789, *numbers, BLOCK=64)
    adamw.update(w, g, m, v, 123456789, *numbers)
    # The interpreter computes some of the products in another order: bits of 99%, the rest nearby.
    for got, want in zip(given, (w, g, m, v), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        same = (got == want) | got.isnan()
        assert same.float().mean() >= 0.97
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 31, 64, 200])
def test_cross_entropy(size, dtype):
    logits = (8 * torch.randn(5, size)).to(dtype)
    targets = torch.randint(size, (5,))
    for gradient in (False, True):
        given, got = logits.clone(), torch.full((5,), torch.nan)
        launch(
            cross_entropy_kernel, (5,), given, targets, got, 5, given.stride(0),
            V=size, GRADIENT=gradient, BLOCK=64,
        )  # fmt: skip
        losses, dlogits = _losses(logits.clone(), targets, gradient)
        torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-5)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(given, dlogits, rtol=2 * step, atol=1e-6)
