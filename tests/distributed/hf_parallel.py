"""What each rank does in test_transformers_parallel.py."""

import dataclasses
import math
from typing import Any

import peft
import torch
from hf_models import NAME, close, small, step, with_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from sonicmoe import report
from sonicmoe.integrations import transformers as adapter
from sonicmoe.integrations.peft import use_lora_experts
from sonicmoe.integrations.transformers import register

_FIELDS = {field.name: str(field.type) for field in dataclasses.fields(DistributedConfig)}
_MODELS_PLAN = "auto" if "auto" in _FIELDS["tp_plan"] else None
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tp_size": 2, "tp_plan": _MODELS_PLAN},
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
        if implementation == NAME:  # the weights of this rank
            weight = next(m for m in loaded.modules() if hasattr(m, "down_proj")).down_proj
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            for said in report(loaded).layers:
                assert (said.runs, said.problem) == ("sonicmoe", None)
                assert said.expert_ranks == (1 if local is weight else 2)
                sizes: Any = (said.experts, said.hidden_size, said.intermediate_size)
                assert math.prod(sizes) == local.numel()
        found = step(loaded)
        return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}

    # Under token dispatch transformers scales the experts' gradients in its own way; up to 5.14 a
    # rank has its part of a gradient as a plain tensor.
    theirs = layout == "dispatch" or _MODELS_PLAN is None
    want = parallel("grouped_mm") if theirs else step(with_backend(model, "eager"))
    close(parallel(NAME), want)


def report_of_sharded_layers(rank: int, lora: bool) -> None:
    """What a step passes to our experts is what the report says before it."""
    register()
    model: Any = with_backend(small("GptOss"), NAME)
    layers = model.model.layers
    if lora:
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_parameters=targets))
        use_lora_experts(model)
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    shards = {name: id(p) for name, p in model.named_parameters()}
    calls: list[Any] = []
    found, original = report(model).layers, adapter.experts
    assert {name: id(p) for name, p in model.named_parameters()} == shards

    def noted(*args, **options):
        calls.append((args, options))
        return original(*args, **options)

    adapter.experts = noted
    try:
        ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(rank))
        model(input_ids=ids, labels=ids).loss.backward()
    finally:
        adapter.experts = original
    assert len(found) == len(calls) == 2
    for said, (arguments, options) in zip(found, calls, strict=True):
        x, _, _, w1, w2, *_ = arguments
        assert (said.runs, said.problem, said.expert_ranks) == ("sonicmoe", None, 1)
        assert (said.experts, said.hidden_size, said.intermediate_size) == w2.shape
        assert said.dtype == x.dtype == w1.dtype == torch.bfloat16
        ranks = [options[n].a.shape[0] // 4 if options[n] else 0 for n in ("lora1", "lora2")]
        assert list(said.lora_ranks) == ranks == [4 * lora] * 2
