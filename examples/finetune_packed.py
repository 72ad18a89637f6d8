"""LoRA on MXFP4 experts that stay packed: makes a small gpt-oss checkpoint, loads and trains it."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GptOssConfig

from sonicmoe.integrations.peft import use_lora_experts
from sonicmoe.integrations.transformers import register

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = GptOssConfig(
    vocab_size=64, hidden_size=64, intermediate_size=32, num_local_experts=4, num_hidden_layers=2,
    num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    # Stands for a checkpoint such as openai/gpt-oss-20b: random codes, two in a byte, and scales.
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    model.config.quantization_config = {"quant_method": "mxfp4"}
    state = model.state_dict()
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(256, (experts, n, k // 32, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.full((experts, n, k // 32), 121, dtype=torch.uint8)
    model.save_pretrained(folder, state_dict=state)

    register()
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="sonicmoe_experts")
    print(model.model.layers[0].mlp.experts.gate_up_proj)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = get_peft_model(model.to(device), LoraConfig(r=8, target_parameters=targets))
    use_lora_experts(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.randint(64, (4, 16), device=device)
    for step in range(40):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == 39:
            print(f"step {step}: loss {loss.item():.3f}")
    model.save_pretrained(f"{folder}/adapter")  # also loads on the model in bf16
