"""Small checkpoints with packed experts, as the published ones: random codes and scales."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import COMMON
from safetensors.torch import save_file

from sonicmoe.integrations.packed_formats import check_method

EXPERTS, LAYERS = 4, 2
NAMES = ("gate_up_proj", "down_proj")


def write(kind: str, folder: Path) -> Path:
    """Write a checkpoint of `kind`; the folder, for `from_pretrained`."""
    config, state, quantization = {
        "mxfp4": _mxfp4, "fp8": _fp8, "fp8_e8m0": _fp8_e8m0, "int4": _int4, "dense": _dense,
        "dense_swapped": _dense_swapped,
    }[kind]()  # fmt: skip
    if quantization:
        skip_if_too_old(quantization["quant_method"])
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    text = config.to_dict() | {"dtype": "bfloat16"}
    text["architectures"] = [type(config).__name__.removesuffix("Config") + "ForCausalLM"]
    if quantization:
        text["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def skip_if_too_old(method: str) -> None:
    """Skip a test of a format that the installed transformers does not load packed."""
    try:
        check_method({"quant_method": method}, None)
    except ValueError as error:
        pytest.skip(str(error))


def gpt_oss(**changes):
    options = dict(
        hidden_size=64, intermediate_size=32, num_local_experts=EXPERTS, num_experts_per_tok=2,
        sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return _config("GptOss", options | changes)


def qwen(hidden: int, intermediate: int):
    return _config(
        "Qwen3Moe",
        dict(hidden_size=hidden, moe_intermediate_size=intermediate, intermediate_size=hidden,
             num_experts=EXPERTS, num_experts_per_tok=2, norm_topk_prob=True),
    )  # fmt: skip


def _config(name: str, options: dict):
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **options})
    config._attn_implementation = "eager"
    return config


def _state(config) -> dict[str, torch.Tensor]:
    """A dense model's, in bf16."""
    kind = getattr(transformers, type(config).__name__.removesuffix("Config") + "ForCausalLM")
    state = kind(config).bfloat16().state_dict()
    made = {}
    for name, t in state.items():
        made[name] = t.clone() if t.any() else 0.5 * torch.randn_like(t)
    return made


def _split(state: dict[str, torch.Tensor], hidden: int, intermediate: int):
    """Drop the fused weights; the paths of gate, up and down of each expert and their sizes."""
    for key in [k for k in state if k.endswith(NAMES) and ".experts." in k]:
        del state[key]
    sizes = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden)}
    sizes["down_proj"] = (hidden, intermediate)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, size in sizes.items():
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", *size


def _mxfp4():
    config = gpt_oss()
    state = _state(config)
    for key in [k for k in state if k.endswith(NAMES)]:
        e, k, n = state.pop(key).shape  # the dense weight is transposed
        state[f"{key}_blocks"] = torch.randint(256, (e, n, k // 32, 16), dtype=torch.uint8)
        state[f"{key}_scales"] = torch.randint(119, 126, (e, n, k // 32), dtype=torch.uint8)
    return config, state, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def _fp8(scale_dtype=torch.float32):
    config = qwen(256, 256)
    state = _state(config)
    for key, n, k in _split(state, 256, 256):
        state[key] = torch.randn(n, k).to(torch.float8_e4m3fn)
        scale = 0.1 * torch.rand(n // 128, k // 128) + 0.05
        if scale_dtype is torch.float8_e8m0fnu:
            scale = torch.exp2(torch.randint(-5, -2, scale.shape).float())
        state[f"{key}_scale_inv"] = scale.to(scale_dtype)
    names = [k.removesuffix(".weight") for k in state if "self_attn" in k or "lm_head" in k]
    quantization = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": [*names, "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }  # fmt: skip
    return config, state, quantization


def _fp8_e8m0():
    config, state, quantization = _fp8(torch.float8_e8m0fnu)
    return config, state, quantization | {"scale_fmt": "ue8m0"}


def _int4():
    config = qwen(64, 64)
    state = _state(config)
    for key, n, k in _split(state, 64, 64):
        state[f"{key}_packed"] = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32)
        state[f"{key}_scale"] = (0.05 * torch.rand(n, k // 32) + 0.01).bfloat16()
        state[f"{key}_shape"] = torch.tensor([n, k])
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
    }  # fmt: skip
    quantization = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    }  # fmt: skip
    return config, state, quantization


def _dense():
    config = qwen(64, 64)
    return config, _state(config), None


def _dense_swapped():
    config = gpt_oss()
    return config, _state(config), None
