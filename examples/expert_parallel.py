"""A small GPT learns to count: experts over pairs of ranks, all other weights over all ranks.

torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from sonicmoe import MoE
from sonicmoe.distributed import clip_grad_norm_, parallelize_model


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width)
        self.moe_norm, self.moe = nn.RMSNorm(width), MoE(8, 2, width, 32, aux_loss_coef=0.01)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out, aux_loss = self.moe(self.moe_norm(x))
        return x + out, aux_loss


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x, total_aux_loss = self.embed(ids[:, :-1]), 0
        for block in self.blocks:
            x, aux_loss = block(x)
            total_aux_loss = total_aux_loss + aux_loss
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten()), total_aux_loss


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = 1 if ranks % 2 else 2  # ranks that share the experts of a layer
    mesh = init_device_mesh(device, (ranks // share, share), mesh_dim_names=("data", "expert"))
    model = parallelize_model(GPT().to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)  # every rank has its own tokens
    for step in range(31):
        ids = (torch.randint(32, (16, 1)) + torch.arange(9)).to(device) % 32
        loss, aux_loss = model(ids)
        (loss + aux_loss).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f} on rank 0")
    dist.destroy_process_group()


main()  # a function, so that the model and its process groups are gone when Python shuts down
