"""A LoRA step of a model shaped like gpt-oss-120b, experts in MXFP4, on one GPU: memory and time.

    python benchmarks/packed_model.py --tokens 4096 --rank 8 --adapters bf16
    python benchmarks/packed_model.py --tokens 16384 --rank 16 --adapters fp32

Weights are random and never dense: the experts are made packed. Layers are checkpointed, and logits
exist for some tokens at a time. Prints a JSON line.
"""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from typing import Any

import torch
from packed_random import random_packed
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig

from sonicmoe.integrations.packed_parameter import PackedParameter
from sonicmoe.integrations.peft import use_lora_experts
from sonicmoe.integrations.quantizers import weight_names
from sonicmoe.integrations.transformers import register
from sonicmoe.train.cross_entropy import linear_cross_entropy

STEPS = 4  # the first compiles
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def packed_model(config: GptOssConfig) -> nn.Module:
    """A frozen model on the GPU."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="sonicmoe_experts"
        )
    experts = {}
    for module in model.modules():
        for name in weight_names(module):
            experts[module, name] = module._parameters.pop(name).shape
    model.to_empty(device="cuda")
    # Its frequencies are computed when it is made.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to("cuda")
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    for (module, name), (number, k, n) in experts.items():
        weight = PackedParameter(random_packed("mxfp4", (number, n, k)), torch.bfloat16, True)
        module.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    return model.requires_grad_(False)


def with_adapters(model: nn.Module, rank: int, dtype: torch.dtype) -> nn.Module:
    lora = LoraConfig(r=rank, target_modules=[], target_parameters=TARGETS)
    tuned = get_peft_model(model, lora, autocast_adapter_dtype=False)
    use_lora_experts(tuned)
    for p in tuned.parameters():
        if p.requires_grad:
            p.data = p.data.to(dtype)
    tuned.gradient_checkpointing_enable()
    tuned.enable_input_require_grads()
    return tuned.train()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = GptOssConfig(
        num_hidden_layers=args.layers, num_local_experts=args.experts, vocab_size=args.vocabulary
    )
    model = packed_model(config)
    resident = torch.cuda.memory_allocated()
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.adapters]
    tuned = with_adapters(model, args.rank, dtype)
    trained = [p for p in tuned.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(config.vocab_size, (args.tokens // args.context, args.context + 1))
    inputs, targets = ids[:, :-1].cuda(), ids[:, 1:].flatten().cuda()
    head = model.lm_head.weight
    losses, seconds = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            hidden = model.model(inputs).last_hidden_state.flatten(0, 1)
            loss = linear_cross_entropy(hidden, head, targets, 4096)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(round(time.perf_counter() - begin, 3))
    return {
        "layers": args.layers, "tokens": args.tokens, "rank": args.rank, "adapters": args.adapters,
        "weights GiB": round(resident / 2**30, 2),
        "trained": sum(p.numel() for p in trained),
        "reserved GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "allocated GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": losses, "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=201088)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--adapters", choices=("bf16", "fp32"), default="bf16")
    args = parser.parse_args()
    register()
    about = {"date": datetime.now(UTC).isoformat(), "device": torch.cuda.get_device_name()}
    about |= {"torch": torch.__version__, "command": " ".join(sys.argv)}
    print(json.dumps({**about, "record": measure(args)}), flush=True)


if __name__ == "__main__":
    main()
