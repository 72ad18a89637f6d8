"""What each rank does in test_transformers_parallel.py."""

import dataclasses
from typing import Any

import torch
from hf_models import NAME, close, small, step, with_backend
from transformers.distributed import DistributedConfig

from sonicmoe.integrations.transformers import register

_FIELDS = {field.name for field in dataclasses.fields(DistributedConfig)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tp_size": 2, "tp_plan": "auto"},
    "expert": {"tp_size": 2, "enable_expert_parallel": True},
}
if "ep_size" in _FIELDS:
    LAYOUTS["expert"] = {"tp_size": 2, "tp_plan": {}, "ep_size": 2}
    LAYOUTS["dispatch"] = {
        "tp_size": 1, "tp_plan": {}, "fsdp_size": 2, "ep_size": 2,
        "ep_plan": {"model.layers.*.mlp.experts": "ep_dispatch_experts"},
    }  # fmt: skip
if "ep_implementation" in _FIELDS:  # 5.23 wants a plan where tp_size is more than one
    LAYOUTS["expert"] = {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"}


def save(rank: int, name: str, folder: str) -> None:
    if rank == 0:
        small(name).save_pretrained(folder)


def two_ranks_equal_one(rank: int, name: str, folder: str, layout: str) -> None:
    register()
    model = small(name)
    options = {"attn_implementation": "eager", "dtype": torch.float32}

    def parallel(implementation: str) -> dict[str, torch.Tensor]:
        loaded = type(model).from_pretrained(
            folder, experts_implementation=implementation,
            distributed_config=DistributedConfig(**LAYOUTS[layout]), **options,
        )  # fmt: skip
        found = step(loaded)
        return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}

    # Under token dispatch transformers scales the experts' gradients in its own way.
    want = parallel("grouped_mm") if layout == "dispatch" else step(with_backend(model, "eager"))
    close(parallel(NAME), want)
