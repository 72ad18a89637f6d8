"""The loss of the head against fp64."""

import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS, laid_out

from sonicmoe_trainer.cross_entropy import linear_cross_entropy

EPS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _inputs(dtype, weight_dtype=None, rows=37, hidden=16, size=50, outliers=False):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, hidden, generator=generator)
    weight = torch.randn(size, hidden, generator=generator)
    if outliers:  # a token and a row of the head; single logits reach thousands
        x[3] *= 100
        weight[7] *= 30
        x *= torch.randn(rows, 1, generator=generator).exp()
    x, weight = x.to(dtype), weight.to(weight_dtype or dtype)
    targets = torch.randint(size, (rows,), generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), targets


def _error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize(
    ("chunk", "outliers"), [(0, False), (8, False), (37, False), (100, False), (8, True)]
)
def test_loss_and_gradients(chunk, outliers, dtype):
    x, weight, targets = _inputs(dtype, outliers=outliers)
    loss = linear_cross_entropy(x, weight, targets, chunk)
    (0.3 * loss).backward()
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = F.cross_entropy(F.linear(*exact), targets)
    (0.3 * want).backward()
    assert _error(loss.detach(), want.detach()) < EPS[dtype]
    for got, wanted in zip((x, weight), exact, strict=True):
        assert got.grad.dtype == dtype
        assert _error(got.grad, wanted.grad) < EPS[dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_arguments(layout):
    def views(tensors):
        found = [laid_out(t.detach(), layout) for t in tensors]
        return [t.detach() if v is None else v for t, v in zip(tensors, found, strict=True)]

    def results(x, weight, targets):
        x, weight = x.requires_grad_(), weight.requires_grad_()
        loss = linear_cross_entropy(x, weight, targets, 8)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    given = views(_inputs(torch.float32))
    wants = results(*(t.clone(memory_format=torch.contiguous_format) for t in given))
    for got, want in zip(results(*given), wants, strict=True):
        torch.testing.assert_close(got, want)


def test_chunks_change_the_gradient_of_the_weight_by_less_than_a_rounding_to_bf16():
    """Summed in bf16, or of chunks that were rounded to it, it would differ by 1e-3 and more."""
    x, weight, targets = _inputs(torch.bfloat16, torch.float32, rows=509)
    with torch.autocast("cpu", torch.bfloat16):
        found = [torch.autograd.grad(linear_cross_entropy(x, weight, targets, chunk), weight)[0]
                 for chunk in (0, 4)]  # fmt: skip
    assert _error(found[1], found[0].double()) < 1e-5


def test_a_negative_chunk_is_refused():
    with pytest.raises(ValueError, match=r"chunk: expected 0 or more rows, got -1"):
        linear_cross_entropy(*_inputs(torch.float32), -1)


def test_under_autocast_the_weight_has_a_gradient_of_its_own_dtype():
    x, weight, targets = _inputs(torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, 8)
    loss.backward()
    exact = [t.detach().bfloat16().double().requires_grad_() for t in (x, weight)]
    F.cross_entropy(F.linear(*exact), targets).backward()
    assert loss.dtype == weight.grad.dtype == torch.float32
    assert _error(weight.grad, exact[1].grad) < EPS[torch.bfloat16]


def test_without_gradients_the_same_loss():
    x, weight, targets = _inputs(torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets, 8)
    assert loss == linear_cross_entropy(x, weight, targets, 8)


def test_frozen_parts_have_no_gradient():
    x, weight, targets = _inputs(torch.float32)
    weight.requires_grad_(False)
    linear_cross_entropy(x, weight, targets, 8).backward()
    assert weight.grad is None and x.grad is not None
