"""A trained model as a Hugging Face folder of the architecture Qwen3-MoE.

config.json, model.safetensors and the tokenizer: `AutoModelForCausalLM.from_pretrained` loads it
and computes the same logits. Each expert has its own tensors, as in checkpoints of that model.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from sonicmoe.plugins import bad_argument, check_writable

from . import checkpoint
from .config import ModelConfig
from .corpus import END_OF_TEXT
from .generate import load_tokenizer
from .run import load_config

# Whether a token's scores sum to one, by the name of the router.
_NORMALISED = {
    "softmax_over_topk": True,
    "topk_over_softmax_normalized": True,
    "topk_over_softmax": False,
}
_PER_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "moe_norm": "post_attention_layernorm",
    "moe.router": "mlp.gate",
}


def export(folder: Path, output: Path) -> None:
    """Write the newest sound checkpoint of the run in `folder` to `output`."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise bad_argument("output", "a new or empty folder", str(output), "Choose another name.")
    check_writable("output", output.parent)
    from safetensors.torch import save_file

    config = load_config(folder)
    dtype = "bfloat16" if config.bf16_weights else "float32"
    description = hf_config(config.model, dtype, load_tokenizer(folder)[1])
    weights = checkpoint.load_latest(folder / "checkpoints")["model"]
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    # All or nothing: a failure leaves no files behind.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".exporting-") as temporary:
        work = Path(temporary) / output.name
        work.mkdir()  # with normal permissions; the temporary folder is private
        save_file(tensors(weights), work / "model.safetensors", metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(description, indent=1))
        shutil.copy(folder / "tokenizer.json", work / "tokenizer.json")
        (work / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT})
        )
        os.rename(work, output)


def tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our state dict under the names of Qwen3-MoE. The head is tied and not written."""
    found = {}
    for name, tensor in weights.items():
        if name == "embed.weight":
            found["model.embed_tokens.weight"] = tensor
        elif name == "norm.weight":
            found["model.norm.weight"] = tensor
        else:
            _, layer, rest = name.split(".", 2)
            found.update(_block(f"model.layers.{layer}", rest, tensor))
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _block(prefix: str, rest: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if rest in ("moe.c_fc.weight", "moe.c_proj.weight"):
        found = {}
        for e, expert in enumerate(tensor):
            if rest == "moe.c_proj.weight":
                parts = {"down_proj": expert}
            else:
                gate, up = expert.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, value in parts.items():
                # A copy: safetensors refuses tensors that share memory.
                found[f"{prefix}.mlp.experts.{e}.{part}.weight"] = value.clone()
        return found
    for ours, theirs in _PER_BLOCK.items():
        if rest.startswith(ours + "."):
            return {f"{prefix}.{theirs}{rest.removeprefix(ours)}": tensor}
    raise bad_argument("checkpoint", "weights that Qwen3-MoE has", rest, "Export a plain model.")


def hf_config(m: ModelConfig, dtype: str, end: int) -> dict[str, Any]:
    """config.json."""
    if m.router not in _NORMALISED:
        expected = f"one that Qwen3-MoE has ({', '.join(_NORMALISED)})"
        remedy = "A Qwen3-MoE configuration cannot express other routers."
        raise bad_argument("router", expected, repr(m.router), remedy)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": dtype,
        "torch_dtype": dtype,  # what version 4 of transformers calls it
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_heads,
        "num_key_value_heads": m.num_kv_heads,
        "head_dim": m.head_dim,
        "max_position_embeddings": m.context,
        "rms_norm_eps": m.norm_eps,
        "rope_theta": m.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "intermediate_size": m.intermediate_size,
        "moe_intermediate_size": m.intermediate_size,
        "num_experts": m.num_experts,
        "num_experts_per_tok": m.experts_per_token,
        "norm_topk_prob": _NORMALISED[m.router],
        "router_aux_loss_coef": m.aux_loss_coef,
        "initializer_range": m.init_std,
        "bos_token_id": end,
        "eos_token_id": end,
    }
