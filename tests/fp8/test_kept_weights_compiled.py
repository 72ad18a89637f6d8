"""Kept FP8 weights of checkpointed and compiled layers."""

import pytest
import torch
import torch._dynamo.testing
from kept_weights import fresh, layer, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint


def test_activation_checkpointing(quantized):
    """The recomputation finds the kept weights, and saves the same tensors."""
    moe, x = layer(), tokens()
    want = torch.autograd.grad(moe(x)[0].sum(), list(moe.parameters()))
    moe.refresh_fp8_weights()
    assert len(quantized) == 4

    def run(x):
        return checkpoint(moe, x, use_reentrant=False)[0]

    torch._dynamo.reset()
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        got = torch.autograd.grad(function(x).sum(), list(moe.parameters()))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    assert len(quantized) == 4
    torch._dynamo.reset()


def test_compiled_models_read_kept_weights(quantized):
    torch._dynamo.reset()
    moe, x = layer(), tokens().requires_grad_()
    moe.refresh_fp8_weights()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, fullgraph=True, backend=counter)
    optimizer = torch.optim.AdamW(moe.parameters(), 0.05, fused=True)

    def step(layer):
        out, loss = layer(x)
        gradients = torch.autograd.grad(out.float().square().sum() + loss, list(moe.parameters()))
        return [out, *gradients]

    outs = []
    for _ in range(3):
        quantized.clear()
        got = step(compiled)
        assert not quantized
        for p, gradient in zip(moe.parameters(), got[1:], strict=True):
            p.grad = gradient
        for a, b in zip(got, step(moe), strict=True):
            assert torch.equal(a, b)
        outs.append(got[0])
        optimizer.step()
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    state = {name: 2 * t for name, t in moe.state_dict().items()}
    nn.Sequential(moe).load_state_dict({f"0.{name}": t for name, t in state.items()})
    loaded = compiled(x)[0]
    assert torch.equal(loaded, fresh(moe)) and not torch.equal(loaded, outs[2])
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_layers_of_a_model_are_compiled_once():
    """PyTorch gives up compiling a function after eight variants of it."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    x = tokens().requires_grad_()
    for moe in (layer() for _ in range(9)):
        moe.refresh_fp8_weights()
        moe.compile(fullgraph=True, backend=counter)
        moe(x)[0].sum().backward()
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_stale_weights_of_a_compiled_model():
    torch._dynamo.reset()
    moe, x = layer(), tokens()
    moe(x)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    out = compiled(x.requires_grad_())[0]
    with torch.no_grad():
        moe.c_fc.weight[2].mul_(2)
    assert compiled(x)[0].isnan().any()
    with pytest.raises(ValueError, match=r"^c_fc\.weight: expected the values it had"):
        torch.optim.SGD(moe.parameters(), 0.1).step()
    with pytest.raises(ValueError, match=r"^c_fc\.weight: expected the values it had"):
        moe(x)
    moe.refresh_fp8_weights()
    assert torch.equal(compiled(x)[0], fresh(moe))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    torch._dynamo.reset()


def test_compiled_with_other_weights(quantized):
    """They are quantized in the call, as are all before the first call that is not compiled."""
    torch._dynamo.reset()
    moe, x = layer(), tokens()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    want = compiled(x)[0]
    assert len(quantized) == 2 and torch.equal(moe(x)[0], want)
    doubled = {"c_fc.weight": 2 * moe.c_fc.weight.detach()}
    expected = torch.func.functional_call(moe, doubled, (x,))[0]
    moe(x)
    quantized.clear()
    call = torch.compile(
        lambda own, x: torch.func.functional_call(moe, own, (x,)), backend="aot_eager"
    )
    assert torch.equal(call(doubled, x)[0], expected) and len(quantized) == 2
    assert torch.equal(compiled(x)[0], want) and len(quantized) == 2
    torch._dynamo.reset()
