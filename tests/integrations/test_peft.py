"""PEFT on experts: its own wrapper around our backend, and `use_lora_experts` in its place."""

import copy
import io

import pytest
import torch
from adapters import randomize
from helpers import budget

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from hf_models import NAME, close, small, step, with_backend
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from sonicmoe.integrations import transformers as adapter
from sonicmoe.integrations.peft import use_lora_experts
from sonicmoe.integrations.transformers import register

UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
# Concatenated; transposed, interleaved and with biases; without a gate.
TARGETS = {
    "Qwen3Moe": [UP, DOWN],
    "GptOss": [UP, DOWN],
    "NemotronH": ["experts.up_proj", DOWN],
}


def adapted(name="Qwen3Moe", targets=None, model=None, std=0.3, **options):
    """A model with LoRA on the weights of the experts, none of it zero, run by PEFT and eager."""
    targets = targets or TARGETS[name]
    options = {"r": 4, "lora_alpha": 8, "target_modules": []} | options
    config = peft.LoraConfig(target_parameters=targets, **options)
    model = peft.get_peft_model(with_backend(model or small(name), "eager"), config)
    randomize(model, std)
    return model


def ours(model):
    model = copy.deepcopy(model)
    use_lora_experts(model)
    return model


def outermost(model):
    return next(m for m in model.modules() if isinstance(m, peft.tuners.lora.ParamWrapper))


@pytest.fixture
def calls(monkeypatch):
    """Which of our functions ran, and on how many adapters."""
    seen, experts = [], adapter.experts

    def recorded(*args, **kwargs):
        seen.append(sum(isinstance(a, adapter.LowRank) for a in kwargs.values()))
        return experts(*args, **kwargs)

    monkeypatch.setattr(adapter, "experts", recorded)
    return seen


@pytest.mark.tries("PEFT", "every gradient of its own forward pass")
def test_its_wrapper_around_our_backend():
    register()
    model = adapted()
    with_ours = copy.deepcopy(model)
    with_ours.base_model.model.set_experts_implementation(NAME)
    close(step(with_ours), step(model))


@pytest.mark.tries("PEFT", "every gradient of `use_lora_experts`")
@pytest.mark.parametrize("name", TARGETS)
def test_same_gradients_as_its_own_forward_pass(name, calls):
    model = adapted(name)
    got = step(ours(model))
    assert calls and set(calls) == {2}
    assert sum("lora_" in n for n in got) == 4 * len(calls)
    close(got, step(model))


@pytest.mark.parametrize("rank", [4, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errs_no_more_than_its_own_forward_pass(dtype, rank):
    """One layer, so that no choice of experts can change. PEFT keeps adapters in fp32.

    scale·B·A is a fifth of W. Where it was larger than W, ours erred up to 1.3 times as much in
    16 bits: it rounds X·Aᵀ, and PEFT only the sum of both weights.
    """
    model = adapted(model=small("Qwen3Moe").to(dtype), r=rank, std=0.1)
    seed = torch.Generator().manual_seed(3)
    x, dout = torch.randn(2, 200, 32, generator=seed)
    scores, ids = torch.randn(200, 8, generator=seed).softmax(-1).topk(3)
    with torch.no_grad():  # what fp64 and the narrow dtype see alike
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))

    def run(block, dtype):
        given = [x.to(dtype, copy=True).requires_grad_(), scores.clone().requires_grad_()]
        if dtype is torch.float64:
            given[1] = scores.double().requires_grad_()
        leaves = {n: p for n, p in block.named_parameters() if p.requires_grad}
        out = block(given[0], ids, given[1])
        grads = torch.autograd.grad(out, [*given, *leaves.values()], dout.to(out.dtype))
        return {"out": out, **dict(zip(["x", "scores", *leaves], grads, strict=True))}

    x, dout = x.to(dtype).float(), dout.to(dtype).float()
    exact = run(outermost(copy.deepcopy(model).double()), torch.float64)
    theirs, got = run(outermost(model), dtype), run(outermost(ours(model)), dtype)
    assert len(got) == 7
    for n in exact:
        budget(got[n], theirs[n], exact[n], name=n, dtype=dtype, tokens=len(x))


@pytest.mark.tries("PEFT", "LoRA on one weight")
@pytest.mark.parametrize("target", [UP, DOWN])
def test_one_of_the_two_weights(target, calls):
    model = adapted(targets=[target])
    close(step(ours(model)), step(model))
    assert calls == [1, 1]


@pytest.mark.tries("PEFT", "several adapters")
def test_several_adapters(calls):
    model = adapted()
    model.add_adapter(
        "second",
        peft.LoraConfig(
            r=3, lora_alpha=7, target_parameters=TARGETS["Qwen3Moe"], target_modules=[]
        ),
    )
    randomize(model)
    with_ours = ours(model)
    results = []
    for active in ("default", "second", ["default", "second"]):
        for m in (model, with_ours):
            m.base_model.set_adapter(active)
            m.zero_grad(set_to_none=True)
        results.append(step(with_ours))
        close(results[-1], step(model))
    assert calls == [2] * 6
    assert len(results[2]) == len(results[0]) + len(results[1]) - 2


@pytest.mark.tries("PEFT", "saving, loading, merging, disabling")
def test_saved_loaded_and_merged_by_peft(tmp_path, calls):
    model = adapted()
    with_ours = ours(model)
    assert with_ours.state_dict().keys() == model.state_dict().keys()
    with_ours.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(
        copy.deepcopy(model).unload(), tmp_path, is_trainable=True
    )
    assert use_lora_experts(again) == 2
    want = step(model)
    close(step(again), want)

    ids = torch.arange(1, 17)[None]
    with torch.no_grad():
        logits, calls[:] = with_ours(input_ids=ids).logits, []
        with with_ours.disable_adapter():
            base = with_ours(input_ids=ids).logits
        assert calls == [0, 0] and not torch.allclose(base, logits, atol=1e-2)
        with_ours.merge_adapter()
        torch.testing.assert_close(with_ours(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
        with_ours.unmerge_adapter()
        calls.clear()
        torch.testing.assert_close(with_ours(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
        assert calls == [2, 2]
        merged = with_ours.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", [0, 1])
def test_an_adapter_merged_alone_counts_once(place):
    """The outer wrapper's or the inner one's: its product is in the weights already."""
    block = outermost(ours(adapted()))
    given = torch.randn(12, 32), torch.randint(8, (12, 3)), torch.rand(12, 3)
    with torch.no_grad():
        want = block(*given)
        (block, block.base_layer)[place].merge()
        torch.testing.assert_close(block(*given), want, rtol=1e-4, atol=1e-4)


def test_without_our_implementation_peft_runs(calls):
    model = adapted()
    with_ours = ours(model)
    with_ours.base_model.model.set_experts_implementation("eager")
    close(step(with_ours), step(model))
    assert not calls


def test_a_copy_and_a_pickled_model_run_their_own_adapters(calls):
    model = ours(adapted())
    want = step(copy.deepcopy(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    calls.clear()
    close(step(again), want)
    assert calls == [2, 2]


def test_an_alias_of_our_implementation_stays():
    register("another_name")
    model = adapted()
    model.base_model.model.set_experts_implementation("another_name")
    use_lora_experts(model)
    assert model.config._experts_implementation == "another_name"


def test_adapters_of_transformers_itself(calls):
    """`model.add_adapter` wraps the experts without a `PeftModel` around the model."""
    config = peft.LoraConfig(r=4, target_parameters=TARGETS["Qwen3Moe"], target_modules=[])
    model = with_backend(small("Qwen3Moe"), "eager")
    model.add_adapter(config)
    randomize(model)
    close(step(ours(model)), step(model))
    assert calls == [2, 2]


@pytest.mark.parametrize("targets", [[UP, DOWN], [UP, DOWN, "mlp.gate.weight"]])
def test_the_router_is_left_to_peft(targets, calls):
    model = adapted(targets=targets)
    close(step(ours(model)), step(model))
    assert calls == [2, 2]


def test_norm_behind_the_experts(calls):
    """As in MuseSpark: with the adapters beside the weights, and merged into them."""
    model = ours(adapted())
    block, given = outermost(model), (torch.randint(8, (12, 3)), torch.rand(12, 3))
    experts = block.get_base_layer()
    experts.has_post_expert_norm, experts.post_expert_norm = True, torch.nn.LayerNorm(32)
    x = torch.randn(12, 32)
    got = block(x, *given)
    model.merge_adapter()
    torch.testing.assert_close(got, block(x, *given), rtol=1e-4, atol=1e-4)
    assert calls == [2, 0]


class _Largest(TorchDispatchMode):
    """The size of the largest tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.data_ptr() not in given:
                self.numel = max(self.numel, t.numel())
        return out


def test_nothing_of_the_size_of_a_weight_is_formed():
    """Neither W + scale·B·A nor a gradient of W, in the forward and the backward pass."""
    model = adapted()
    weight = outermost(model).get_base_layer().down_proj.numel()
    sizes = []
    given = torch.randn(4, 32), torch.randint(8, (4, 3)), torch.rand(4, 3)
    for m in (ours(model), model):
        outermost(m)(*given)  # recognizes the gate on a grid of numbers, once
        with _Largest() as largest:
            outermost(m)(given[0].clone().requires_grad_(), *given[1:]).sum().backward()
        sizes.append(largest.numel)
        assert all(p.grad is None for n, p in m.named_parameters() if "lora_" not in n)
    assert sizes[0] < weight <= sizes[1]


@pytest.mark.tries("PEFT", "gradient checkpointing, `torch.compile`")
def test_gradient_checkpointing(calls):
    model = adapted()
    want = step(model)
    with_ours = ours(model)
    with_ours.train()
    with_ours.enable_input_require_grads()
    with_ours.base_model.model.gradient_checkpointing_enable()
    close(step(with_ours), want)
    assert calls == [2] * 4


def test_compiled_without_a_graph_break():
    block = outermost(ours(adapted()))
    given = torch.randn(12, 32), torch.randint(8, (12, 3)), torch.rand(12, 3)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    torch.testing.assert_close(compiled(*given), block(*given))
    assert counter.frame_count == 1


# --- errors ---------------------------------------------------------------------------------------
def test_a_model_without_lora_on_experts_raises():
    model = peft.get_peft_model(small("Qwen3Moe"), peft.LoraConfig(target_modules=["q_proj"]))
    for wrong in (model, small("Qwen3Moe")):
        with pytest.raises(ValueError, match="model: expected a PEFT model with LoRA on experts"):
            use_lora_experts(wrong)


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_experts_in_fp8(name, calls):
    """With biases, if the model has them: near to PEFT's own forward pass in bf16."""
    register("in_fp8", precision="fp8")
    model = adapted(name).to(torch.bfloat16)
    low = copy.deepcopy(model)
    low.get_base_model().set_experts_implementation("in_fp8")
    use_lora_experts(low)
    assert low.config._experts_implementation == "in_fp8"
    x = torch.randn(40, 32).bfloat16()
    given = (torch.randint(4, (40, 2)), torch.rand(40, 2).bfloat16())
    want, got = (outermost(m)(x, *given) for m in (model, low))
    error = (got.double() - want).norm() / want.double().norm()
    assert calls == [2] and 0.01 < error < 0.1


def test_other_models_keep_what_the_name_stands_for(monkeypatch):
    table = type(ALL_EXPERTS_FUNCTIONS)._global_mapping
    for options in ({"memory": "recompute"}, {"precision": "fp8"}):
        with monkeypatch.context() as patch:
            patch.setitem(table, NAME, None)  # restored afterwards
            del table[NAME]
            register(**options)
            ours, model = table[NAME], adapted()
            use_lora_experts(model)
            assert model.config._experts_implementation == NAME
            assert table[NAME] is ours


def test_lora_on_a_bias_raises():
    model = adapted("GptOss", targets=[UP, DOWN, "experts.down_proj_bias"])
    with pytest.raises(ValueError, match="target_parameters: expected gate_up_proj and down_proj"):
        use_lora_experts(model)


def test_experts_without_the_interface_raise():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, intermediate_size_mlp=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        num_local_experts=2, pad_token_id=0,
    )  # fmt: skip
    model = adapted(targets=[UP, DOWN], model=Llama4ForCausalLM(config))
    with pytest.raises(ValueError, match="experts interface, got Llama4TextExperts"):
        use_lora_experts(model)


def test_weights_that_are_not_frozen_raise():
    model = ours(adapted())
    outermost(model).get_base_layer().down_proj.requires_grad_()
    with pytest.raises(ValueError, match="w2: expected a frozen tensor"):
        step(model)


def test_part_of_the_experts_raises():
    """r·E rows of an adapter would be taken for a larger r of fewer experts."""
    model = ours(adapted())
    experts = outermost(model).get_base_layer()
    experts.num_experts = 4
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name)[:4], requires_grad=False))
    with pytest.raises(ValueError, match="down_proj: expected the weights of all 8 experts"):
        outermost(model)(torch.randn(4, 32), torch.randint(4, (4, 2)), torch.rand(4, 2))


def test_dropout_raises_in_peft():
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        adapted(lora_dropout=0.1)


def test_mixed_batches_raise_in_peft():
    model = ours(adapted())
    given = torch.randn(4, 32), torch.randint(8, (4, 2)), torch.rand(4, 2)
    with pytest.raises(ValueError, match="does not support mixed adapter batches"):
        outermost(model)(*given, adapter_names=["default"] * 4)
