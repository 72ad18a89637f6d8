"""PEFT on experts: its own wrapper around our backend, and our low-rank path on its factors."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from hf_models import NAME, close, small, step, with_backend

from sonicmoe.integrations.lora import LowRank, lora_experts
from sonicmoe.integrations.transformers import register


@pytest.fixture
def adapted():
    """A model of transformers with LoRA on both weights of the experts, none of it zero."""
    register()
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=targets)
    model = peft.get_peft_model(with_backend(small("Qwen3Moe"), "eager"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.tries("PEFT", "its wrapper around our backend, every gradient")
def test_its_wrapper_around_our_backend(adapted):
    ours = copy.deepcopy(adapted)
    ours.base_model.model.set_experts_implementation(NAME)
    close(step(ours), step(adapted))


@pytest.mark.tries("PEFT", "our LoRA GEMMs on its adapters")
def test_our_products_on_its_factors(adapted):
    outer = next(m for m in adapted.modules() if type(m).__name__ == "ParamWrapper")
    inner = outer.base_layer
    experts = inner.base_layer
    factors = {
        wrapper.parameter_name: LowRank(
            wrapper.lora_A["default"].weight,
            wrapper.lora_B["default"].weight,
            wrapper.scaling["default"],
        )
        for wrapper in (outer, inner)
    }
    weights = experts.gate_up_proj.detach(), experts.down_proj.detach()
    x, ids, scores = torch.randn(12, 32), torch.randint(8, (12, 3)), torch.rand(12, 3)
    got = lora_experts(
        x, ids, scores, *weights, factors["gate_up_proj"], factors["down_proj"],
        gate_up="concatenated",
    )  # fmt: skip
    torch.testing.assert_close(got, outer(x, ids, scores), rtol=1e-4, atol=1e-5)
