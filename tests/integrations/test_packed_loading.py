"""`from_pretrained` with our experts: what is packed in the file stays packed, and is saved so."""

import copy
import inspect
import json

import pytest
import torch
import transformers
from packed_checkpoints import EXPERTS, NAMES, gpt_oss, qwen, write
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from sonicmoe.integrations import packed_formats, quantizers
from sonicmoe.integrations.packed_parameter import PackedParameter, dequantize_experts
from sonicmoe.integrations.transformers import register

bitsandbytes = pytest.importorskip("bitsandbytes", reason="comes with the extra 'test'")
pytest.importorskip("compressed_tensors", reason="comes with the extra 'test'")

OURS = {"experts_implementation": "sonicmoe_experts"}
IDS = torch.arange(1, 17)[None]
IN_FILE = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config, "fp8_e8m0": FineGrainedFP8Config}
BYTES = {"mxfp4": 4.25, "fp8": 8 + 32 / 128**2, "fp8_e8m0": 8 + 8 / 128**2, "int4": 4.5}


@pytest.fixture(autouse=True)
def _registered():
    register()


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, **options)


def experts_of(model, layer=0):
    return model.model.layers[layer].mlp.experts


def weights_of(model):
    return {n: p for n, p in model.named_parameters() if n.endswith(NAMES)}


def in_nf4(quant_type="nf4", nested=False, **options):
    options |= {"bnb_4bit_quant_type": quant_type, "bnb_4bit_use_double_quant": nested}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options)}


def bits(t):
    return t.view(torch.uint8) if t.dim() and t.element_size() == 1 else t


@pytest.mark.tries(
    "Hugging Face transformers", "packed MXFP4, FP8 and INT4 experts, saved as loaded"
)
@pytest.mark.parametrize("kind", [*IN_FILE, "int4"])
def test_stays_packed_from_file_to_file(kind, tmp_path):
    path = write(kind, tmp_path / "model")
    model = load(path, **OURS)
    assert not model._forward_pre_hooks  # of compressed-tensors, which would wrap every module
    if kind == "int4":  # transformers always decompresses these experts
        dense = load(path)
        dense.set_experts_implementation(OURS["experts_implementation"])
    else:
        dense = load(
            path, dtype="bfloat16", quantization_config=IN_FILE[kind](dequantize=True), **OURS
        )
    want = weights_of(dense)
    for name, packed in weights_of(model).items():
        assert isinstance(packed, PackedParameter) and not packed.requires_grad
        assert packed.dtype is torch.bfloat16 and packed.shape == want[name].shape
        assert torch.equal(packed.dequantize(), want[name]), name
        used = sum(t.nbytes for _, t in packed.packed.tensors())
        assert 8 * used == BYTES[kind] * packed.numel()
    logits = model(IDS).logits
    assert torch.equal(logits, dense(IDS).logits)

    model.save_pretrained(tmp_path / "saved")
    before, after = (load_file(p / "model.safetensors") for p in (path, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(before[n].dtype == after[n].dtype for n in before)
    assert all(torch.equal(bits(before[n]), bits(after[n])) for n in before)
    assert torch.equal(load(tmp_path / "saved", **OURS)(IDS).logits, logits)


@pytest.mark.tries("Hugging Face transformers", "experts in 4 bits of bitsandbytes")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "kind, quant_type", [("dense", "nf4"), ("dense_swapped", "nf4"), ("dense", "fp4")]
)
def test_load_in_4bit_quantizes_experts(kind, quant_type, nested, tmp_path, monkeypatch):
    monkeypatch.setattr(quantizers, "_SLICE", 1)  # an expert at once
    path = write(kind, tmp_path / "model")
    model = load(path, **in_nf4(quant_type, nested), **OURS)
    for name, weight in load_file(path / "model.safetensors").items():
        if name.endswith(NAMES):
            codes, state = bitsandbytes.functional.quantize_4bit(
                weight, blocksize=64, quant_type=quant_type, compress_statistics=nested
            )
            packed = model.get_parameter(name)
            assert torch.equal(packed.packed.codes, codes)
            want = bitsandbytes.functional.dequantize_4bit(codes, state)
            assert torch.equal(packed.dequantize(), want)
    logits = model(IDS).logits
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", **OURS)
    assert all(isinstance(p, PackedParameter) for p in weights_of(again).values())
    assert torch.equal(again(IDS).logits, logits)


def renamed(folder):
    """The folder as the version before wrote it."""
    file = folder / "model.safetensors"
    state = load_file(file)
    codes = [n for n in state if f"{n}_absmax" in state]
    assert len(codes) == 4
    save_file({n + "_codes" * (n in codes): t for n, t in state.items()}, file, {"format": "pt"})


@pytest.mark.parametrize("before", [False, True], ids=["", "version before"])
def test_saved_nf4_is_recognised_without_asking_for_ours(before, tmp_path):
    model = load(write("dense", tmp_path / "model"), **in_nf4(nested=True), **OURS)
    model.save_pretrained(tmp_path / "saved")
    if before:
        renamed(tmp_path / "saved")
    theirs, again = load(tmp_path / "saved"), load(tmp_path / "saved", **OURS)
    for found in map(weights_of, (theirs, again)):
        assert all(isinstance(p, PackedParameter) for p in found.values())
        for name, want in weights_of(model).items():
            assert torch.equal(found[name].dequantize(), want.dequantize())
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    logits = theirs(IDS).logits
    dequantize_experts(theirs)
    assert torch.equal(theirs(IDS).logits, logits)


def test_plain_transformers_refuses_saved_nf4(tmp_path, monkeypatch):
    """As where `register()` was not called. Before 5.23, the first call may raise."""
    load(write("dense", tmp_path / "model"), **in_nf4(), **OURS).save_pretrained(tmp_path / "saved")
    plain = inspect.unwrap(transformers.modeling_utils.get_hf_quantizer)
    monkeypatch.setattr(transformers.modeling_utils, "get_hf_quantizer", plain)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        load(tmp_path / "saved")(IDS)


def test_dense_experts_beside_4_bits_raise_where_ours_are_asked_for(tmp_path):
    path = write("dense", tmp_path / "model")
    model = load(path, **in_nf4())
    with pytest.raises(ValueError, match=r"expected experts in 4 bits .* llm_int8_skip_modules"):
        model.set_experts_implementation(OURS["experts_implementation"])
    model.save_pretrained(tmp_path / "saved")
    assert not any(isinstance(p, PackedParameter) for p in load(tmp_path / "saved").parameters())
    with pytest.raises(ValueError, match=r"expected experts in 4 bits, got .*experts in 16 bits"):
        load(tmp_path / "saved", **OURS)
    kept = load(path, **in_nf4(llm_int8_skip_modules=["experts", "lm_head"]))
    kept.set_experts_implementation(OURS["experts_implementation"])


class _Dense(TorchDispatchMode):
    """The largest tensor of 16 bits or more, in memory, that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            packed = isinstance(t, PackedParameter)
            if (
                isinstance(t, torch.Tensor)
                and not packed
                and t.is_floating_point()
                and not t.is_meta
            ):
                self.largest = max(self.largest, t.numel() * (t.element_size() > 1))
        return out


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4"])
def test_nothing_dense_on_the_way(kind, tmp_path, monkeypatch):
    """No dense weight while loading, and none expected by the memory that is taken at first."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # modes are those of one thread
    path, expected = write(kind, tmp_path), []

    def warmup(model, device_map, quantizer):
        names = {n: "cuda" for n, _ in model.named_parameters() if ".experts." in n}
        counts = transformers.modeling_utils.get_total_byte_count(model, names, quantizer)
        expected.append(sum(counts.values()))

    monkeypatch.setattr(transformers.modeling_utils, "caching_allocator_warmup", warmup)
    with _Dense() as dense:
        model = load(path, device_map="cpu", **OURS)
    weights = weights_of(model)
    smallest = min(w.numel() for w in weights.values())
    other = max(p.numel() for n, p in model.named_parameters() if n not in weights)
    assert dense.largest <= max(other, smallest // 2)
    used = sum(t.nbytes for w in weights.values() for _, t in w.packed.tensors())
    assert len(expected) == 1 and used <= expected[0] < 1.2 * used + 2**11


def test_nf4_takes_the_memory_of_4_bits_at_first(tmp_path, monkeypatch):
    sizes = {}

    def warmup(model, device_map, quantizer):
        for name, p in model.named_parameters():
            sizes[name] = quantizer.param_element_size(model, name, p)

    monkeypatch.setattr(transformers.modeling_utils, "caching_allocator_warmup", warmup)
    load(write("dense", tmp_path), device_map="cpu", **in_nf4(), **OURS)
    assert {sizes[n] for n in sizes if n.endswith(NAMES)} == {0.5}


# --- models that do not ask for ours, or ask for dense weights ------------------------------------
def test_other_models_are_loaded_as_before(tmp_path):
    before = dict(AUTO_QUANTIZER_MAPPING)
    path = write("mxfp4", tmp_path)
    load(path, **OURS)
    assert before == AUTO_QUANTIZER_MAPPING
    for options in ({}, {"quantization_config": Mxfp4Config(dequantize=True), **OURS}):
        model = load(path, **options)
        assert not any(isinstance(p, PackedParameter) for p in model.parameters())


@pytest.mark.parametrize("kind", ["fp8", "dense"])
def test_experts_that_are_left_out_stay_dense(kind, tmp_path):
    path = write(kind, tmp_path)
    options = in_nf4(llm_int8_skip_modules=["experts", "lm_head"])
    if kind == "fp8":
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"]["modules_to_not_convert"].append("experts")
        (path / "config.json").write_text(json.dumps(config))
        options = {}
    model = load(path, **options, **OURS)
    assert not any(isinstance(p, PackedParameter) for p in model.parameters())


@pytest.mark.parametrize("kind", ["FP8Experts", "Mxfp4GptOssExperts"])
def test_a_model_quantized_by_transformers_raises(kind):
    """They know no other implementation, and would ignore the name."""
    from transformers.integrations import finegrained_fp8, mxfp4

    model = transformers.Qwen3MoeForCausalLM(qwen(256, 256))
    if kind == "FP8Experts":
        finegrained_fp8.replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config())
    else:
        model.model.layers[0].mlp.experts = mxfp4.Mxfp4GptOssExperts(gpt_oss())
    with pytest.raises(ValueError, match=f"experts that were loaded for it, got {kind}"):
        model.set_experts_implementation(OURS["experts_implementation"])


# --- what raises ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "hqq"},
        {"quant_method": "torchao", "quant_type": {"default": "int4"}},
        {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["lm_head", "shared_experts"]},
        {
            "quant_method": "gptq",
            "bits": 4,
            "modules_to_not_convert": ["model.layers.0.mlp.experts"],
        },
        {"quant_method": "mxfp8"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ],
    ids=lambda config: config["quant_method"],
)
def test_other_methods_raise_and_name_the_remedy(config, tmp_path):
    path = write("dense", tmp_path)
    text = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(text))
    with pytest.raises(
        ValueError, match=r"quantization_config: expected experts in MXFP4.*load_in_4bit"
    ):
        load(path, **OURS)


def test_an_old_transformers_raises(tmp_path, monkeypatch):
    path = write("mxfp4", tmp_path)
    monkeypatch.setitem(packed_formats._SINCE, "mxfp4", "6.1")
    with pytest.raises(ValueError, match=r"expected transformers 6\.1 or newer.*16 bits"):
        load(path, **OURS)


def test_gguf_raises(tmp_path):
    if (
        "gguf_file"
        not in inspect.signature(transformers.quantizers.auto.get_hf_quantizer).parameters
    ):
        pytest.skip(f"transformers {transformers.__version__} always reads GGUF into dense weights")
    write("dense", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gguf_file: expected None.*dequantize=True"):
        transformers.Qwen3MoeForCausalLM.from_pretrained(
            tmp_path, config=config, gguf_file="a.gguf", **OURS
        )


@pytest.mark.parametrize(
    "kind, changes, match",
    [
        ("fp8", {"activation_scheme": "static"}, "activation_scheme: expected dynamic"),
        ("int4", {"config_groups": {"a": {"targets": ["Linear"], "weights": {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor",
        }}}}, "got num_bits=8, type=float"),
        ("fp8", {"weight_block_size": [64, 64]}, r"weight_block_size: expected \[128, 128\]"),
        ("fp8", {"modules_to_not_convert": ["lm_head"]}, "no FP8 layers but experts"),
        ("int4", {"format": "int-quantized"}, "format=pack-quantized, got format=int-quantized"),
        ("int4", {"config_groups": {"a": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
        }}}}, "got group_size=128"),
    ],
)  # fmt: skip
def test_other_kinds_of_a_format_raise(kind, changes, match, tmp_path):
    path = write(kind, tmp_path)
    text = json.loads((path / "config.json").read_text())
    text["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=match + ".*dequantize=True"):
        load(path, **OURS)


@pytest.mark.parametrize("kind", ["mxfp4", "int4"])
def test_a_missing_or_misshapen_tensor_raises(kind, tmp_path):
    path = write(kind, tmp_path) / "model.safetensors"
    state = load_file(path)
    key = next(k for k in sorted(state) if k.endswith(("_scales", "_scale")))
    scale = state.pop(key)
    save_file(state, path, metadata={"format": "pt"})
    if kind == "mxfp4":  # one of INT4's experts alone would be an error of transformers
        with pytest.raises(ValueError, match=r"expected a tensor .*_scales, got none"):
            load(tmp_path, **OURS)
        state[key] = scale[:, :32].contiguous()
        save_file(state, path, metadata={"format": "pt"})
        # The second is transformers' own from 5.23 on.
        words = r"checkpoint: expected .*_scales \(4, 64, 1\)|ignore_mismatched_sizes"
        with pytest.raises((ValueError, RuntimeError), match=words):
            load(tmp_path, **OURS)
    else:
        shape = next(k for k in sorted(state) if k.endswith("gate_proj.weight_shape"))
        state[key], state[shape] = scale, state[shape] + 1
        save_file(state, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match="weight_shape: expected"):
            load(tmp_path, **OURS)
        state = {k: t.half() if k.endswith("_scale") else t for k, t in state.items()}
        save_file(state, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"weight_scale in BF16, got F16"):
            load(tmp_path, **OURS)


def test_gate_and_up_that_share_a_block_raise(tmp_path):
    """The file has a scale for 96 rows of gate; of gate and up together, it would be for 128."""
    path = write("fp8", tmp_path)
    text = json.loads((path / "config.json").read_text()) | {"moe_intermediate_size": 96}
    (path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match="intermediate_size: expected a multiple of 128 rows"):
        load(path, **OURS)


def test_sizes_outside_the_blocks_raise(tmp_path):
    model = transformers.GptOssForCausalLM(gpt_oss(hidden_size=36, intermediate_size=18))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"experts: expected weights of an expert in blocks of 64"):
        load(tmp_path, **in_nf4(), **OURS)
    text = json.loads((tmp_path / "config.json").read_text())
    text["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=r"in_features: expected a multiple of 32 in MXFP4"):
        load(tmp_path, **OURS)


def test_a_dense_model_in_gptq_is_none_of_our_business(tmp_path):
    config = transformers.LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4})
    config.save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="GPTQ"):  # what transformers says
        load(tmp_path, **OURS)


# --- dense again ----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4", "dense"])
def test_dequantized_experts_are_saved_dense(kind, tmp_path):
    path = write(kind, tmp_path / "model")
    model = load(path, **(in_nf4() if kind == "dense" else {}), **OURS)
    logits, packed = model(IDS).logits, weights_of(model)
    if kind in ("mxfp4", "dense"):
        other = copy.deepcopy(model).dequantize()  # transformers' own, which knows Linear alone
        assert not any(isinstance(p, PackedParameter) for p in other.parameters())
    assert dequantize_experts(model) == 4
    for name, weight in weights_of(model).items():
        assert type(weight) is torch.nn.Parameter
        assert torch.equal(weight, packed[name].dequantize())
    assert torch.equal(model(IDS).logits, logits)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype="bfloat16", **OURS)
    assert not any(isinstance(p, PackedParameter) for p in again.parameters())
    assert torch.equal(again(IDS).logits, logits)
    assert experts_of(again).gate_up_proj.shape[0] == EXPERTS
