"""`sonicmoe.report` of models of transformers, with and without PEFT."""

import absent_gpu
import peft
import pytest
import transformers
from hf_models import small
from torch import nn

from sonicmoe import MemoryPolicy, MoE, report
from sonicmoe.integrations.peft import use_lora_experts
from sonicmoe.integrations.transformers import register


@pytest.fixture
def mixtral():
    register()
    return small("Mixtral")


def test_experts_of_transformers(mixtral):
    """The implementation that a model has now; every layer of it."""
    (first, second) = report(mixtral).layers
    assert first.name == "model.layers.0.mlp.experts" and second.module == "MixtralExperts"
    assert first.runs == "transformers' grouped_mm" and first.backend is None
    assert "grouped_mm_experts_forward. For sonicmoe: register()" in first.why
    mixtral.set_experts_implementation("eager")
    (layer, _) = report(mixtral).layers
    assert layer.runs == "transformers' eager" and "the model's own loop" in layer.why
    mixtral.set_experts_implementation("sonicmoe_experts")
    found = report(mixtral)
    (layer, _) = found.layers
    assert layer.why == "experts_implementation='sonicmoe_experts'"
    assert (layer.runs, layer.backend, layer.experts) == ("sonicmoe", "torch", 4)
    assert (layer.activation, layer.gate_up) == ("swiglu", "concatenated")
    assert "model.layers.{0, 1}.mlp.experts" in str(found)


def test_options_of_a_registered_name(mixtral):
    register("report_fp8", precision="fp8", cache_fp8_weights=True, memory="recompute")
    mixtral.bfloat16().set_experts_implementation("report_fp8")
    (layer, _) = report(mixtral).layers
    assert (layer.precision, layer.cache_fp8_weights) == ("fp8", True)
    assert layer.memory == MemoryPolicy("recompute") and layer.problem is None


def test_kernels_of_experts_of_transformers(monkeypatch, mixtral):
    absent_gpu.present(monkeypatch)
    mixtral.bfloat16().set_experts_implementation("sonicmoe_experts")
    found = report(mixtral)
    assert found.fast and found.layers[0].kernels == "hopper"
    assert "forward" in str(found) and "hopper_wgrad_kernel" in str(found)


def test_experts_that_were_replaced(mixtral):
    """A `forward` of its own, or an activation that is not ours; but hooks of accelerate run it."""
    hooks = pytest.importorskip("accelerate.hooks")
    mixtral.set_experts_implementation("sonicmoe_experts")
    first, second = (layer.mlp.experts for layer in mixtral.model.layers)
    hooks.add_hook_to_module(first, hooks.ModelHook())
    second.act_fn = nn.Softsign()
    one, other = report(mixtral).layers
    assert (one.runs, one.problem) == ("sonicmoe", None)
    assert "experts: expected an activation among" in other.problem
    first.forward = lambda x, top_k_index, top_k_weights: x
    (one, _) = report(mixtral).layers
    assert one.runs == __name__ and f"its forward is now {__name__}.test_experts_that" in one.why


def test_a_model_without_the_experts_interface():
    config = transformers.Llama4TextConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_experts_per_tok=2, vocab_size=64, num_local_experts=4, interleave_moe_layer_step=1,
        num_key_value_heads=2, head_dim=16, intermediate_size_mlp=16, pad_token_id=0,
    )  # fmt: skip
    (layer,) = report(transformers.AutoModelForCausalLM.from_config(config)).layers
    assert (layer.name, layer.module) == ("model.layers.0.feed_forward", "Llama4TextMoe")
    assert layer.runs == "transformers" and layer.backend is None


def test_peft(mixtral):
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    mixtral.set_experts_implementation("sonicmoe_experts")
    model = peft.get_peft_model(mixtral, peft.LoraConfig(r=4, target_parameters=targets))
    (layer, _) = report(model).layers
    assert layer.name == "base_model.model.model.layers.0.mlp.experts"
    assert layer.runs == "peft" and "use_lora_experts(model)" in layer.why
    use_lora_experts(model)
    (layer, _) = report(model).layers
    assert (layer.runs, layer.lora_ranks, layer.backend) == ("sonicmoe", (4, 4), "torch")
    with model.disable_adapter():
        (layer, _) = report(model).layers
    assert layer.lora_ranks == (0, 0) and "disabled or merged" in layer.why
    model.set_experts_implementation("grouped_mm")
    assert report(model).layers[0].runs == "transformers' grouped_mm"


def test_peft_on_moe():
    targets = ["c_fc.weight", "c_proj.weight"]
    config = peft.LoraConfig(r=8, target_parameters=targets)
    model = peft.get_peft_model(nn.Sequential(MoE(4, 2, 64, 32)), config)
    (layer,) = report(model).layers
    assert "after use_lora_experts(model)" in layer.problem
    use_lora_experts(model)
    (layer,) = report(model).layers
    assert layer.problem is None and layer.lora_ranks == (8, 8)
