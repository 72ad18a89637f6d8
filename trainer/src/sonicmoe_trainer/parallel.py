"""One process or the group that torchrun starts, and a model sharded over it."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from sonicmoe.plugins import bad_argument

from .backends import LAYER_BACKENDS
from .config import TrainConfig

T = TypeVar("T")


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
        """Whether the flag is set on any rank, so that all ranks stop at the same step."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def from_first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank only and return its result on every rank.

        An exception is raised on every rank too, so that none waits for a failed one.
        """
        result: T | None = None
        error: Exception | None = None
        if self.first:
            try:
                result = action()
            except Exception as caught:
                error = caught
        if self.size > 1:
            both = [result, error]
            dist.broadcast_object_list(both, src=0)
            result, error = cast("tuple[T | None, Exception | None]", both)
        if error is not None:
            raise error
        return cast(T, result)


def start(device: str) -> World:
    """Join torchrun's process group if there is one. `device` is "auto", "cpu" or "cuda"."""
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


def shard(model: nn.Module, blocks: Iterable[Any], world: World, config: TrainConfig) -> None:
    """Shard every block, and then the rest, over all ranks (FSDP2). In place.

    With expert parallelism, `expert_parallel` ranks share the experts of a layer.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from sonicmoe.distributed import parallelize_model

    kind, together, blocks = world.device.type, config.expert_parallel, list(blocks)
    policy = MixedPrecisionPolicy()
    if config.is_autocast:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if together > 1:
        shape = (world.size // together, together)
        grid = init_device_mesh(kind, shape, mesh_dim_names=("data", "expert"))
        parallelize_model(model, grid, blocks=blocks, mp_policy=policy)
        for block in blocks:
            # It synchronizes to learn the sizes of its exchanges, which no graph can capture.
            block.moe.forward = torch.compiler.disable(block.moe.forward)
        return
    everyone = init_device_mesh(kind, (world.size,))
    for module in (*blocks, model):
        fully_shard(module, mesh=everyone, mp_policy=policy)


def synchronise_gradients(model: nn.Module, wanted: bool) -> None:
    """Set whether the next backward pass reduces gradients; only the last one has to."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def check_expert_parallel(config: TrainConfig, world: World) -> None:
    ranks = config.expert_parallel
    if ranks == 1:
        return
    if world.size % ranks:
        remedy = f"Start with torchrun --nproc-per-node {ranks} -m sonicmoe train …"
        processes = f"a divisor of the {world.size} process(es)"
        raise bad_argument("expert_parallel", processes, ranks, remedy)
    if config.model.num_experts % ranks:
        divisor = f"a divisor of num_experts = {config.model.num_experts}"
        remedy = "Every rank holds the same number of experts."
        raise bad_argument("expert_parallel", divisor, ranks, remedy)
    if config.backend not in LAYER_BACKENDS:
        ours = f"{', '.join(LAYER_BACKENDS)} with expert_parallel"
        raise bad_argument("backend", ours, repr(config.backend), "The other packages lack it.")
