"""Fine-tune a Hugging Face model with our experts; a tiny random one, so that nothing is loaded.

pip install -e '.[hf]'. For a real model: from_pretrained(name, experts_implementation=…).
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from sonicmoe.integrations.transformers import register

register()
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=128,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    output_router_logits=True,  # adds the model's own balance loss
)
model = AutoModelForCausalLM.from_config(config, experts_implementation="sonicmoe_experts")
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

text = (torch.arange(4 * 64) % 100).view(4, 64).to(device)  # sequences that count upwards
for step in range(20):
    loss = model(input_ids=text, labels=text).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 or step == 19:
        print(f"step {step}: loss {loss.item():.3f}")
