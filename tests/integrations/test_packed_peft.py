"""LoRA on packed experts, as PEFT's users write it, against the same model with dense experts."""

import copy
import io

import pytest
import torch
from packed_checkpoints import NAMES, qwen, write
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Mxfp4Config

from sonicmoe.integrations import transformers as adapter
from sonicmoe.integrations.packed_parameter import PackedParameter, dequantize_experts, packed_of
from sonicmoe.integrations.peft import use_lora_experts
from sonicmoe.integrations.transformers import register

bitsandbytes = pytest.importorskip("bitsandbytes", reason="comes with the extra 'test'")
peft = pytest.importorskip("peft", reason="comes with the extra 'test'")

OURS = {"experts_implementation": "sonicmoe_experts"}
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.arange(1, 17)[None]


@pytest.fixture(autouse=True)
def _registered():
    register()


def load(kind, folder, **options):
    if kind.startswith("dense"):
        # Attention too: on some CPUs bitsandbytes rounds otherwise where no gradient is needed.
        kept = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=kept
        )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(write(kind, folder / kind), **OURS, **options)


def dense(model):
    model = copy.deepcopy(model)
    assert dequantize_experts(model)
    return model


def with_lora(model, targets=TARGETS):
    config = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=targets, target_modules=[])
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for factor in factors(model).values():
        torch.nn.init.normal_(factor, std=0.1)
    return model


def factors(model):
    """A and B of every adapter, in an order that does not depend on which one PEFT wraps first."""
    found = {}
    wrappers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.ParamWrapper)]
    for name in NAMES:
        for layer, wrapper in enumerate(w for w in wrappers if w.parameter_name == name):
            found[f"{layer}.{name}.A"] = wrapper.lora_A["default"].weight
            found[f"{layer}.{name}.B"] = wrapper.lora_B["default"].weight
    return found


def step(model):
    """Logits and every gradient, for a random gradient of the logits."""
    model.zero_grad()
    logits = model(IDS).logits
    logits.backward(
        torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits)
    )
    assert all(p.grad is None for n, p in model.named_parameters() if "lora_" not in n)
    found = {n: p.grad.clone() for n, p in factors(model).items() if p.grad is not None}
    return {"logits": logits.detach()} | found


def equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.tries("PEFT", "packed experts: every gradient equal to dense, saved adapters")
@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4", "dense", "dense_swapped"])
def test_same_bits_as_dense(kind, tmp_path):
    """Also after another step, and of adapters that are saved from packed and loaded on both."""
    packed = load(kind, tmp_path)
    plain = dense(packed)
    ours, theirs = with_lora(copy.deepcopy(packed)), with_lora(copy.deepcopy(plain))
    assert use_lora_experts(ours) == use_lora_experts(theirs) == 2
    want = step(theirs)
    assert len(want) == 9 and all(want[n].any() for n in want)
    for _ in range(2):
        equal(step(ours), want)
    assert sum(isinstance(p, PackedParameter) for p in ours.parameters()) == 4

    ours.save_pretrained(tmp_path / "adapter")
    for model in (packed, plain):
        again = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
        use_lora_experts(again)
        assert torch.equal(again(IDS).logits, want["logits"])


def test_peft_alone_is_right_but_slow(tmp_path):
    """Its own forward pass dequantizes what it reads, with a warning."""
    packed = load("mxfp4", tmp_path)
    plain = dense(packed)
    got, want = (step(with_lora(model)) for model in (packed, plain))
    assert len(want) == 9
    equal(got, want)


def test_nothing_is_dequantized_by_ours(tmp_path, monkeypatch):
    model = with_lora(load("mxfp4", tmp_path))
    use_lora_experts(model)
    monkeypatch.setattr(PackedParameter, "dequantize", lambda self: pytest.fail("dequantized"))
    step(model)
    model.save_pretrained(tmp_path / "adapter")


@pytest.mark.tries("PEFT", "packed experts: merging raises, and works after `dequantize_experts`")
@pytest.mark.parametrize("kind", ["mxfp4", "dense"])
def test_merging(kind, tmp_path):
    model = with_lora(load(kind, tmp_path))
    use_lora_experts(model)
    logits = model(IDS).logits
    for safe in (False, True):
        with pytest.raises(ValueError, match=r"dequantize_experts\(model\)"):
            model.merge_and_unload(safe_merge=safe)
    dequantize_experts(model)
    want = model(IDS).logits
    assert torch.equal(want, logits)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, want, rtol=0.1, atol=0.1)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="bfloat16", **OURS)
    assert torch.equal(again(IDS).logits, merged(IDS).logits)


def test_prepared_as_for_qlora(tmp_path):
    """`prepare_model_for_kbit_training` writes every 16-bit parameter in fp32: packed ones stay."""
    model = load("mxfp4", tmp_path)
    before = model.model.layers[0].mlp.experts.gate_up_proj.packed
    model = peft.prepare_model_for_kbit_training(model)
    after = model.model.layers[0].mlp.experts.gate_up_proj.packed
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(before.tensors(), after.tensors(), strict=True)
    )
    model = with_lora(model)
    use_lora_experts(model)
    got = step(model)  # with gradient checkpointing
    assert len(got) == 9


def test_in_fp8(tmp_path):
    """e4m3 holds MXFP4 without an error: the same as FP8 experts with the dequantized weights."""
    register("packed_in_fp8", precision="fp8")
    model = load("mxfp4", tmp_path)
    plain = dense(model)
    experts = model.model.layers[0].mlp.experts
    results = []
    for m in (plain, model):
        m = with_lora(m)
        m.get_base_model().set_experts_implementation("packed_in_fp8")
        use_lora_experts(m)
        results.append(step(m))
    equal(*results)
    kept = experts.gate_up_proj.packed.fp8
    equal(step(m), results[0])
    assert kept is not None and experts.gate_up_proj.packed.fp8 is kept
    experts.load_state_dict(copy.deepcopy(experts.state_dict()))
    assert experts.gate_up_proj.packed.fp8 is None
    equal(step(m), results[0])


# --- experts that others quantized ----------------------------------------------------------------
def in_place(model):
    """Experts in NF4 as bitsandbytes parametrizes them."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for layer in model.model.layers:
        for name in NAMES:
            replace_parameter_4bit(layer.mlp.experts, name, quant_type="nf4", blocksize=64)
    return model


@pytest.fixture(params=["dense", "dense_swapped"])
def parametrized(request, tmp_path):
    """Makes a model: copies of one would share a class, which PyTorch changes for all."""
    path = write(request.param, tmp_path)
    return lambda: in_place(AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", **OURS))


FULL = [f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in NAMES]


def test_parametrized_by_bitsandbytes(parametrized):
    """PEFT adds its adapters once more in every call, and one of two has no gradient."""
    plain, theirs = parametrized(), with_lora(parametrized(), FULL)
    assert dequantize_experts(plain) == 4
    theirs.get_base_model().set_experts_implementation("eager")
    want = with_lora(plain)
    use_lora_experts(want)
    want = step(want)
    with torch.no_grad():
        calls = [theirs(IDS).logits for _ in range(3)]
    assert not torch.equal(calls[0], calls[1]) and not torch.equal(calls[1], calls[2])

    ours = with_lora(parametrized(), FULL)
    use_lora_experts(ours)
    for _ in range(2):
        equal(step(ours), want)
    with pytest.raises(
        ValueError, match=r"gate_up_proj: expected experts of bitsandbytes that nothing"
    ):
        theirs.get_base_model().set_experts_implementation(OURS["experts_implementation"])
        theirs.base_model.model.model.layers[0].mlp.experts.get_base_layer()(
            torch.randn(4, 64).bfloat16(), torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
        )


def test_peft_leaves_an_adapter_without_gradient(parametrized):
    theirs = with_lora(parametrized(), FULL)
    theirs.get_base_model().set_experts_implementation("eager")
    got = step(theirs)
    assert set(got) == {"logits"} | {n for n in factors(theirs) if "gate_up_proj" in n}


def test_other_blocks_of_bitsandbytes_raise():
    codes = bitsandbytes.nn.Params4bit(torch.ones(2, 64, 128), blocksize=128).to("cpu")
    experts = torch.nn.Module()
    experts.down_proj = codes
    with pytest.raises(ValueError, match=r"down_proj: .* in blocks of 64, got blocksize=128"):
        packed_of(experts, "down_proj")


def test_params4bit(tmp_path):
    """As unsloth quantizes experts: in the place of the parameter."""
    path = write("dense", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", **OURS)
    for layer in model.model.layers:
        for name in NAMES:
            weight = getattr(layer.mlp.experts, name).data
            made = bitsandbytes.nn.Params4bit(weight, quant_type="nf4", blocksize=64).to("cpu")
            del layer.mlp.experts._parameters[name]
            layer.mlp.experts.register_parameter(name, made)
    want = dense(model)(IDS).logits
    assert torch.equal(model(IDS).logits, want)


def test_fp8_of_transformers_loses_the_adapter():
    """PEFT adds B·A to e4m3 codes, without their scale: it is rounded away. The experts of
    transformers with a forward pass in PyTorch, as theirs needs a GPU."""
    from transformers import FineGrainedFP8Config, Qwen3MoeForCausalLM
    from transformers.integrations.finegrained_fp8 import (
        FP8ExpertsInterface,
        replace_with_fp8_linear,
    )

    def dense_of(experts, name):
        scale = getattr(experts, f"{name}_scale_inv")
        scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        return getattr(experts, name).float() * scale

    def in_pytorch(experts, x, ids, scores):
        weights = [dense_of(experts, name).detach() for name in NAMES]
        return adapter.experts(x, ids, scores, *weights, gate_up="concatenated")

    FP8ExpertsInterface.register("in_pytorch", in_pytorch)
    model = Qwen3MoeForCausalLM(qwen(128, 128))
    plain = copy.deepcopy(model)
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    replace_with_fp8_linear(model, names, FineGrainedFP8Config())
    model.config._experts_implementation = "in_pytorch"
    for layer, other in zip(model.model.layers, plain.model.layers, strict=True):
        experts = layer.mlp.experts
        for name, p in list(experts.named_parameters()):
            codes = (50 * torch.randn(p.shape)).to(p.dtype)
            made = torch.full(p.shape, 2e-3) if "scale" in name else codes
            setattr(experts, name, torch.nn.Parameter(made, requires_grad=False))
        for name in NAMES:
            getattr(other.mlp.experts, name).data = dense_of(experts, name)
    with torch.no_grad():
        base = model(IDS).logits
        torch.testing.assert_close(plain(IDS).logits, base)
        right, wrong = (with_lora(m)(IDS).logits - base for m in (plain, model))
    assert wrong.norm() < 0.1 * right.norm()


# --- the parameter itself -------------------------------------------------------------------------
def test_copied_pickled_moved_and_loaded(tmp_path):
    model = load("dense", tmp_path)
    experts = model.model.layers[0].mlp.experts
    want = experts.gate_up_proj.dequantize()

    def check(module, dtype=torch.bfloat16):
        weight = module.gate_up_proj
        assert isinstance(weight, PackedParameter) and isinstance(weight, torch.nn.Parameter)
        assert weight.dtype is dtype and torch.equal(weight.dequantize().to(want.dtype), want)

    file = io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    check(torch.load(file, weights_only=False))
    file = io.BytesIO()
    torch.save(experts.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(experts)
    check(other)
    other.gate_up_proj.packed.codes.zero_()
    experts.gate_up_proj.clone().packed.codes.zero_()
    check(experts)
    other.load_state_dict(torch.load(file))
    check(other)
    check(other.to(torch.float32), torch.float32)
    assert other.to("meta").gate_up_proj.packed.codes.is_meta


def test_a_weight_that_requires_a_gradient_raises(tmp_path):
    model = load("mxfp4", tmp_path)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="gate_up_proj: expected frozen weights"):
        model(IDS)


def test_compiled(tmp_path):
    experts = load("mxfp4", tmp_path).model.layers[0].mlp.experts
    given = torch.randn(12, 64).bfloat16(), torch.randint(4, (12, 2)), torch.rand(12, 2).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: 2 * experts(*given), backend="aot_eager")
    assert torch.equal(compiled(*given), 2 * experts(*given))


def test_another_implementation_sees_dense_weights(tmp_path):
    model = load("mxfp4", tmp_path)
    want = dense(model)
    for m in (model, want):
        m.set_experts_implementation("eager")
    assert torch.equal(model(IDS).logits, want(IDS).logits)
    theirs = load("mxfp4", tmp_path, quantization_config=Mxfp4Config(dequantize=True))
    theirs.set_experts_implementation("eager")
    assert torch.equal(model(IDS).logits, theirs(IDS).logits)


def test_kept_fp8_weights_raise(tmp_path):
    register("packed_kept", precision="fp8", cache_fp8_weights=True)
    model = load("mxfp4", tmp_path)
    model.set_experts_implementation("packed_kept")
    with pytest.raises(ValueError, match="cache_fp8_weights: expected False for packed experts"):
        model(IDS)
