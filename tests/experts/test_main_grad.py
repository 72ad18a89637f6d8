"""Weight gradients added to an fp32 `main_grad` by the GEMM itself."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sonicmoe import MoE, experts

E, K, H, I, T = 5, 2, 16, 8, 40


def micro_batches(dtype):
    generator = torch.Generator().manual_seed(0)
    x, dout = torch.randn(2, 3, T, H, generator=generator).to(dtype)
    ids = torch.randint(-1, E - 1, (3, T, K), generator=generator)  # the last expert gets nothing
    scores = torch.rand(3, T, K, generator=generator)
    return list(zip(x, ids, scores, dout, strict=True))


def weights(dtype, transposed):
    generator = torch.Generator().manual_seed(1)

    def new(*shape):
        w = torch.randn(shape, generator=generator).to(dtype)
        return torch.nn.Parameter(w.mT.contiguous().mT if transposed else w)

    return new(E, 2 * I, H), new(E, H, I)


def with_main_grads(parameters):
    for w in parameters:
        w.main_grad = torch.full_like(w, 0.5, dtype=torch.float32)
    return parameters


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_same_as_adding_up_outside(dtype, transposed):
    added = with_main_grads(weights(dtype, transposed))
    outside = weights(dtype, transposed)
    sums = [torch.full_like(w, 0.5, dtype=torch.float32) for w in outside]
    for x, ids, scores, dout in micro_batches(dtype):
        x_grads = []
        for w in (added, outside):
            leaf = x.clone().requires_grad_()
            experts(leaf, ids, scores, *w).backward(dout)
            x_grads.append(leaf.grad)
        assert torch.equal(*x_grads)
        for total, w in zip(sums, outside, strict=True):
            total += w.grad
            w.grad = None
    for w, total in zip(added, sums, strict=True):
        assert w.grad is None
        assert w.main_grad.stride() == w.stride()
        if dtype == torch.float32:
            assert torch.equal(w.main_grad, total)
        else:  # not rounded to 16 bits before it is added
            assert (w.main_grad - total).norm() < 2**-8 * total.norm()
        assert (w.main_grad[-1] == 0.5).all()


def test_in_the_layer_and_under_checkpointing():
    torch.manual_seed(0)
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        moe = MoE(E, K, H, I)
        with_main_grads([moe.c_fc.weight, moe.c_proj.weight])
        x = torch.randn(T, H, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = (
            checkpoint(lambda x, moe=moe: moe(x)[0], x, use_reentrant=False)
            if checkpointed
            else moe(x)[0]
        )
        out.square().sum().backward()
        assert moe.router.weight.grad is not None and moe.c_fc.weight.grad is None
        found.append((moe.c_fc.weight.main_grad, moe.c_proj.weight.main_grad))
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again) and not (plain == 0.5).all()


def test_under_autocast():
    moe = MoE(E, K, H, I)
    with_main_grads([moe.c_fc.weight, moe.c_proj.weight])
    with torch.autocast("cpu", torch.bfloat16):
        moe(torch.randn(T, H))[0].square().sum().backward()
    for weight in (moe.c_fc.weight, moe.c_proj.weight):
        assert weight.grad is None
        assert not (weight.main_grad == 0.5).all()


def test_hooks_run_for_a_trainer_that_asks():
    w1, w2 = with_main_grads(weights(torch.float32, False))
    w1.grad_added_to_main_grad = False
    called = []
    w1.register_post_accumulate_grad_hook(lambda w: called.append(w.grad_added_to_main_grad))
    x, ids, scores, dout = micro_batches(torch.float32)[0]
    experts(x, ids, scores, w1, w2).backward(dout)
    assert called == [True]
    assert not hasattr(w2, "grad_added_to_main_grad")


def test_frozen_weights_are_left_alone():
    w1, w2 = with_main_grads(weights(torch.float32, False))
    w1.requires_grad_(False)
    x, ids, scores, dout = micro_batches(torch.float32)[0]
    experts(x, ids, scores, w1, w2).backward(dout)
    assert (w1.main_grad == 0.5).all() and not (w2.main_grad == 0.5).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda w: torch.zeros_like(w, dtype=torch.bfloat16),
        lambda w: torch.zeros(w.shape[1:]),
        lambda w: torch.zeros(w.mT.shape).mT,
    ],
    ids=["dtype", "shape", "strides"],
)
def test_a_buffer_that_does_not_fit(wrong):
    w1, w2 = weights(torch.float32, False)
    w1.main_grad = wrong(w1)
    x, ids, scores, _ = micro_batches(torch.float32)[0]
    with pytest.raises(ValueError, match=r"main_grad.*zeros_like"):
        experts(x, ids, scores, w1, w2)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_compiled(checkpointed):
    """Compiled GEMMs add to the buffers too, and notice one that was not there before."""

    def run(moe, x):
        return (checkpoint(moe, x, use_reentrant=False) if checkpointed else moe(x))[0]

    torch.manual_seed(0)
    one = MoE(E, K, H, I)
    many, x = copy.deepcopy(one), torch.randn(T, H)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    # PyTorch 2.11 does not guard the absence of an attribute: buffers must be there at first.
    notices = torch.__version__ >= torch.torch_version.TorchVersion("2.13")
    for buffers in (False, True, True) if notices else (True, True):
        for moe, forward in ((one, run), (many, compiled)):
            for weight in (moe.c_fc.weight, moe.c_proj.weight):
                weight.grad = None
                if buffers and not hasattr(weight, "main_grad"):
                    weight.main_grad = torch.full_like(weight, 0.5, dtype=torch.float32)
            forward(moe, x).square().sum().backward()
        for a, b in zip(one.parameters(), many.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == hasattr(a, "main_grad")
            name = "main_grad" if hasattr(a, "main_grad") else "grad"
            torch.testing.assert_close(getattr(b, name), getattr(a, name))


def test_hooks_run_after_a_compiled_forward_pass():
    w1, w2 = with_main_grads(weights(torch.float32, False))
    w1.grad_added_to_main_grad = False
    called = []
    w1.register_post_accumulate_grad_hook(lambda w: called.append(w.grad_added_to_main_grad))
    x, ids, scores, dout = micro_batches(torch.float32)[0]
    torch._dynamo.reset()
    torch.compile(experts, backend="eager")(x, ids, scores, w1, w2).backward(dout)
    assert called == [True] and not (w1.main_grad == 0.5).all()


@pytest.mark.parametrize("name", ["w1", "w2"])
@pytest.mark.parametrize(
    "wrong",
    [
        None,
        lambda w: None,
        lambda w: [0.0],
        lambda w: torch.zeros_like(w, dtype=torch.float64),
        lambda w: torch.zeros(w.shape[1:]),
    ],
    ids=["deleted", "None", "no tensor", "dtype", "shape"],
)
def test_a_buffer_that_is_gone_or_wrong_in_the_backward_pass(wrong, name):
    given = dict(zip(("w1", "w2"), with_main_grads(weights(torch.float32, False)), strict=True))
    x, ids, scores, dout = micro_batches(torch.float32)[0]
    out = experts(x, ids, scores, **given)
    if wrong is None:
        del given[name].main_grad
    else:
        given[name].main_grad = wrong(given[name])
    with pytest.raises(ValueError, match=r"^main_grad: expected "):
        out.backward(dout)
    assert given[name].grad is None


def test_a_buffer_replaced_by_one_like_it():
    w1, w2 = with_main_grads(weights(torch.float32, False))
    x, ids, scores, dout = micro_batches(torch.float32)[0]
    out = experts(x, ids, scores, w1, w2)
    old = w1.main_grad
    w1.main_grad = torch.zeros_like(old)
    out.backward(dout)
    assert (old == 0.5).all() and w1.main_grad.any()
