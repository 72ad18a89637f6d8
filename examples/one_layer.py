"""Train one Mixture-of-Experts layer: the kernels on a GPU, plain PyTorch elsewhere."""

import torch

from sonicmoe import MoE

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
torch.manual_seed(0)
moe = MoE(num_experts=8, num_experts_per_tok=2, hidden_size=64, intermediate_size=32)
moe.to(device=device, dtype=dtype)
optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2)

x = torch.randn(256, 64, device=device, dtype=dtype)
target = x.roll(1, dims=-1)  # what the layer learns
for step in range(50):
    output, aux_loss = moe(x)
    error = (output - target).float().square().mean()
    (error + 0.01 * aux_loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == 49:
        print(f"step {step}: error {error.item():.3f}, auxiliary loss {aux_loss.item():.2f}")
