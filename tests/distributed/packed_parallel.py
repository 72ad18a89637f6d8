"""What each rank does in test_packed_parallel.py."""

import contextlib
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from sonicmoe.integrations.packed_parameter import PackedParameter
from sonicmoe.integrations.peft import use_lora_experts
from sonicmoe.integrations.transformers import register

# bitsandbytes leaves these to fp32.
KEPT = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
STEPS = 3


def _model(folder: str) -> Any:
    """A model with packed experts and with LoRA on them and on its attention, in fp32."""
    register()
    options: dict[str, Any] = {}
    if Path(folder).name == "dense":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=KEPT
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="sonicmoe_experts", dtype=torch.float32, **options
    )
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    model = get_peft_model(
        model, LoraConfig(r=4, target_parameters=experts, target_modules=["q_proj"])
    )
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.1)
    use_lora_experts(model)
    return model


def packed(model: Any) -> dict[str, PackedParameter]:
    """By their names without those of wrappers."""
    return {
        name.removeprefix("module."): p
        for name, p in model.named_parameters()
        if isinstance(p, PackedParameter)
    }


def _codes(model: Any) -> list[torch.Tensor]:
    return [t for p in packed(model).values() for _, t in p.packed.tensors()]


def _train(model: Any, rows: slice) -> list[float]:
    """The loss of each step, its mean over the ranks."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    ids = torch.randint(1, 64, (4, 16), generator=torch.Generator().manual_seed(0))[rows]
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def trains_as_one_process(rank: int, folder: str) -> dict[str, list[float]]:
    """Losses of one process, under DDP and under FSDP2; packed experts stay what they are."""
    one = _model(folder)
    losses = {"one process": _train(one, slice(None))}
    replicated, by_layer, at_once = _model(folder), _model(folder), _model(folder)
    if rank:  # DDP takes the first rank's, FSDP2 each rank's own
        for t in _codes(replicated):
            t.zero_()
    replicated = DistributedDataParallel(replicated)
    for layer in by_layer.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(by_layer)
    fully_shard(at_once)
    for name, model in {"DDP": replicated, "FSDP2": by_layer, "FSDP2 at once": at_once}.items():
        losses[name] = _train(model, slice(2 * rank, 2 * rank + 2))
        assert packed(model).keys() == packed(one).keys() and len(packed(one)) == 4
        for mine, t in zip(_codes(model), _codes(one), strict=True):
            assert torch.equal(mine, t)
    return losses


def refusals(rank: int, folder: str) -> dict[str, str]:
    """What would shard packed experts raises, whatever this PyTorch calls its functions."""
    model = _model(folder)
    weight = next(iter(packed(model).values()))

    def renamed() -> None:
        name = "_move_states_to_device"
        with contextlib.ExitStack() as patches:
            for file in (_fsdp_init, _fully_shard):
                patches.enter_context(patch.object(file, name, lambda *args: None, create=True))
            fully_shard(model)

    calls = {
        "FSDP1": lambda: cast(Any, FlatParamHandle)([weight]),
        "meta": lambda: fully_shard(_model(folder).to("meta")),
        "renamed": renamed,
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = "no error"
        except ValueError as error:
            messages[name] = str(error)
    return messages
