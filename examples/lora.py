"""LoRA on the frozen experts of a layer: W + scale·B·A is never formed, and W gets no gradient."""

import torch
from torch import nn

from sonicmoe import LowRank, MoE, experts, topk_scores

E, K, H, I, RANK = 8, 2, 64, 32, 4
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
moe = MoE(E, K, H, I).to(device).requires_grad_(False)


def adapter(rows: int, columns: int) -> LowRank:
    """In PEFT's layout, all experts in one A and one B; B starts at zero."""
    a = nn.Parameter(torch.randn(RANK * E, columns, device=device) / columns**0.5)
    b = nn.Parameter(torch.zeros(rows, RANK * E, device=device))
    return LowRank(a, b, scale=2.0)


up, down = adapter(2 * I, H), adapter(H, I)
optimizer = torch.optim.AdamW([up.a, up.b, down.a, down.b], lr=1e-2)
x = torch.randn(256, H, device=device)
target = x.roll(1, dims=-1)
scores, ids = topk_scores(moe.router(x), K)
for step in range(50):
    output = experts(x, ids, scores, moe.c_fc.weight, moe.c_proj.weight, lora1=up, lora2=down)
    error = (output - target).square().mean()
    error.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == 49:
        print(f"step {step}: error {error.item():.3f}")
assert moe.c_fc.weight.grad is None
