"""Small random models of transformers, and one step of training them."""

import copy
import inspect
import sys

import pytest
import torch
import transformers

NAME = "sonicmoe_experts"
COMMON = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0,
    output_router_logits=False, initializer_range=0.2,
)  # fmt: skip
MODELS: dict[str, dict] = {
    "Mixtral": dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2),
    "Qwen3Moe": dict(
        intermediate_size=24, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "Olmoe": dict(intermediate_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False),
    "GraniteMoe": dict(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2),
    "DeepseekV3": dict(
        intermediate_size=24, moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=3, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8,
        kv_lora_rank=8, head_dim=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    ),
    "GptOss": dict(
        intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "NemotronH": dict(  # no gates: up, squared ReLU, down
        layers_block_type=["attention", "moe"], moe_intermediate_size=16, n_routed_experts=8,
        moe_shared_expert_intermediate_size=16, num_experts_per_tok=3, intermediate_size=16,
    ),
}  # fmt: skip

_QWEN = {
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
# Their experts are Qwen3-MoE's; what else is in their layer matters to converted weights only.
WITH_GATED_SHARED_EXPERT: dict[str, dict] = {
    "Qwen2Moe": {**_QWEN, "norm_topk_prob": False},
    "Qwen3Next": {
        **_QWEN,
        "norm_topk_prob": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def small(name: str, **changes):
    options = {**COMMON, **(MODELS | WITH_GATED_SHARED_EXPERT)[name], **changes}
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = "eager"
    kind = getattr(transformers, f"{name}ForCausalLM")
    if "@use_experts_implementation" not in inspect.getsource(sys.modules[kind.__module__]):
        pytest.skip(f"{name} has no experts interface in transformers {transformers.__version__}")
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases start as zeros, and would prove nothing
            if not parameter.any():
                parameter.normal_(std=0.5)
    return model


def with_backend(model, implementation: str):
    model = copy.deepcopy(model)
    model.set_experts_implementation(implementation)
    return model


def step(model) -> dict[str, torch.Tensor]:
    """Logits, loss and every gradient."""
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **gradients}


def close(got, want, tolerance=2e-5):
    assert got.keys() == want.keys()
    for name in want:
        scale = want[name].abs().max().item()
        torch.testing.assert_close(
            got[name], want[name], rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
