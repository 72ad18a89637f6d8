"""Experts spread over the ranks of a group; every rank passes its own tokens.

torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py
"""

import os

import torch
import torch.distributed as dist

from sonicmoe import MoE
from sonicmoe.distributed import parallelize


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # parallelize takes the weights of rank 0
    moe = MoE(num_experts=8, num_experts_per_tok=2, hidden_size=64, intermediate_size=32).to(device)
    parallelize(moe, dist.group.WORLD)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2)

    torch.manual_seed(rank)
    x = torch.randn(128 + 64 * rank, 64, device=device)  # any number of tokens on each rank
    target = x.roll(1, dims=-1)
    for step in range(50):
        output, aux_loss = moe(x)
        error = (output - target).square().mean()
        ((error + 0.01 * aux_loss) / ranks).backward()  # gradients are summed over the ranks
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == 49):
            print(f"step {step}: error {error.item():.3f} on rank 0")
    dist.destroy_process_group()


main()  # a function, so that the layer and its process group are gone when Python shuts down
