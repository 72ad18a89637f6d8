"""One process or many: the group that torchrun starts, and a model sharded over it (FSDP2)."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..errors import bad_argument


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.size
        return value

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank: ranks must not part ways over a signal."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def start(device: str) -> World:
    """Join the group of torchrun if there is one. `device` is "auto", "cpu" or "cuda"."""
    if device not in ("auto", "cpu", "cuda"):
        raise bad_argument(
            "device", "auto, cpu or cuda", repr(device), "auto takes a GPU if there is one."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise bad_argument("device", "a GPU that PyTorch can use", "none", "Use --device cpu.")
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return World(0, 1, torch.device(kind, 0) if kind == "cuda" else torch.device(kind))
    here = (
        torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    )
    if kind == "cuda":
        torch.cuda.set_device(here)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return World(dist.get_rank(), size, here)


def stop(world: World) -> None:
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def shard(model: nn.Module, blocks: Iterable[nn.Module], world: World, precision: str) -> None:
    """Cut every block's parameters, and then the rest, over all ranks. In place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy()
    if precision == "autocast":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def synchronise_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass reduces gradients over the ranks; only the last one need."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def check_expert_parallel(expert_parallel: int) -> None:
    if expert_parallel > 1:
        raise bad_argument(
            "expert_parallel", "1 (experts are sharded over ranks by FSDP2)", expert_parallel,
            "Start with torchrun --nproc-per-node N and leave expert_parallel at 1.",
        )  # fmt: skip
