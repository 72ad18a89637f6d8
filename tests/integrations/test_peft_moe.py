"""PEFT on `MoE`: its adapters through `sonicmoe.experts`."""

import copy

import pytest
import torch
from adapters import randomize

pytest.importorskip("peft")

import peft

from sonicmoe import MoE
from sonicmoe.integrations.peft import use_lora_experts


def moe_with_lora(**options):
    """A model of one `MoE` with LoRA on both weights of its experts, none of it zero."""
    model = torch.nn.Sequential(MoE(4, 2, 16, 8, **options).double())
    targets = ["0.c_fc.weight", "0.c_proj.weight"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=targets, target_modules=[])
    model = peft.get_peft_model(model, config)
    randomize(model)
    return model


@pytest.mark.tries("PEFT", "LoRA on `MoE`: every gradient, merging, disabling")
def test_moe():
    model, x = moe_with_lora(), torch.randn(12, 16, dtype=torch.double)
    assert use_lora_experts(model) == 1
    moe = model.base_model.model[0]
    layer = copy.deepcopy(model).merge_and_unload()[0]
    torch.testing.assert_close(moe(x)[0], layer(x)[0])
    weights = {"c_fc": layer.c_fc.weight, "c_proj": layer.c_proj.weight}
    for weight in weights.values():
        weight.requires_grad_()
    dout = torch.randn(12, 16, dtype=torch.double)
    layer(x)[0].backward(dout)
    moe(x)[0].backward(dout)
    for name, weight in weights.items():  # of W + scale·B·A
        wrapper = getattr(moe, name)
        a, b = (m["default"].weight for m in (wrapper.lora_A, wrapper.lora_B))
        factors = a.view(4, 4, -1), b.view(len(b), 4, 4)
        da, db = torch.autograd.grad(
            2 * torch.einsum("ore,eri->eoi", factors[1], factors[0]), (a, b), weight.grad
        )
        torch.testing.assert_close(a.grad, da)
        torch.testing.assert_close(b.grad, db)
        assert wrapper.weight.grad is None


def test_moe_with_adapters_disabled_merged_and_copied():
    model, x = moe_with_lora(), torch.randn(12, 16, dtype=torch.double)
    use_lora_experts(model)
    moe = model.base_model.model[0]
    with torch.no_grad():
        want = moe(x)[0]
        with model.disable_adapter():
            assert not torch.allclose(moe(x)[0], want)
        copied = copy.deepcopy(model)
        model.merge_adapter()
        torch.testing.assert_close(moe(x)[0], want)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(copied.base_model.model[0](x)[0], want)


def test_moe_does_not_ignore_adapters():
    """PEFT's wrapper has the weight without them."""
    model = moe_with_lora()
    with pytest.raises(ValueError, match=r"^c_fc: expected .* after use_lora_experts\(model\)"):
        model.base_model.model[0](torch.randn(12, 16, dtype=torch.double))
