"""A LoRA step of a model shaped like gpt-oss on one GPU: memory and time.

    python benchmarks/packed_model.py
    python benchmarks/packed_model.py --peers FOLDER --runs 4096,8,bf16
    python benchmarks/packed_model.py --model gpt-oss-20b --ways all --runs 4096,16,fp32
    python benchmarks/packed_model.py --model tiny

A run is TOKENS,RANK,ADAPTERS: 4096 tokens with adapters of rank 8 in bf16 and an 8-bit Adam (of
bitsandbytes, from FOLDER; without it Adam in bf16), and 16384 tokens with rank 16 and Adam in fp32.
Weights are random. The experts are made in MXFP4 and stay so, or are decoded once, before our layer
or PEFT alone trains adapters on them: `--ways`. All ways have the same weights, tokens and
adapters. A way whose first gradients differ from those of the first way is not kept. Layers are
checkpointed, and logits exist for some tokens at a time. Prints a JSON line for each run and way;
the tiny model runs anywhere.
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from packed_random import random_packed
from peft import LoraConfig, get_peft_model
from research import records
from research.sink_attention import register_sink_attention
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig

from sonicmoe.integrations.packed_parameter import PackedParameter, dequantize_experts
from sonicmoe.integrations.peft import use_lora_experts
from sonicmoe.integrations.quantizers import weight_names
from sonicmoe.integrations.transformers import register
from sonicmoe.train.cross_entropy import linear_cross_entropy

STEPS = 4  # the first compiles
CONTEXT = 1024
LOGITS = 1024  # tokens whose logits are alive at a time
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
DTYPE = torch.bfloat16  # of the model
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
RUNS = "4096,8,bf16 16384,16,fp32"
MODELS: dict[str, dict[str, int]] = {  # other sizes are the defaults
    "gpt-oss-120b": {"num_hidden_layers": 36, "num_local_experts": 128},
    "gpt-oss-20b": {"num_hidden_layers": 24, "num_local_experts": 32},
    "tiny": dict(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_local_experts=4,
        num_hidden_layers=2, num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32,
    ),
}  # fmt: skip
# Of gradients, in the norm of each kind of adapter. A kind without gradient differs by 1. Rounding
# changes choices of the router: 0.16 and, with e4m3, 0.23 in the tiny model; 1e-6 in fp32.
DIFFERENCE = 0.5


class Way(NamedTuple):
    """How experts are stored and who computes their adapters."""

    implementation: str
    is_packed: bool
    by_us: bool = True


WAYS = {
    "ours to bf16": Way("sonicmoe_experts", True),
    "ours to e4m3": Way("in_fp8", True),
    "ours on bf16": Way("sonicmoe_experts", False),
    "PEFT on bf16": Way("grouped_mm", False, by_us=False),
}


class Run(NamedTuple):
    tokens: int
    rank: int
    adapters: str  # "bf16" or "fp32"

    @classmethod
    def of(cls, text: str) -> "Run":
        tokens, rank, adapters = text.split(",")
        if adapters not in DTYPES or int(tokens) % CONTEXT:
            expected = f"TOKENS,RANK,ADAPTERS with a multiple of {CONTEXT} tokens, bf16 or fp32"
            raise SystemExit(f"--runs: expected {expected}, got {text}")
        return cls(int(tokens), int(rank), adapters)


def frozen_model(config: GptOssConfig, way: Way, device: torch.device) -> nn.Module:
    """A model whose experts are in MXFP4, or have the same values in bf16."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=DTYPE,
            experts_implementation=way.implementation,
            attn_implementation=register_sink_attention(),
        )
    experts = {}
    for module in model.modules():
        for name in weight_names(module):
            experts[module, name] = module._parameters.pop(name).shape
    model.to_empty(device=device)
    # Its frequencies are computed when it is made.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    for name, p in model.named_parameters():
        nn.init.ones_(p) if "norm" in name else nn.init.normal_(p, std=0.02)
    for (module, name), (number, k, n) in experts.items():
        packed = random_packed("mxfp4", (number, n, k), device)
        weight = PackedParameter(packed, DTYPE, swapped=True)
        module.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        if not way.is_packed:
            dequantize_experts(module)
    return model.requires_grad_(False)


def with_adapters(model: nn.Module, way: Way, run: Run, device: torch.device) -> nn.Module:
    lora = LoraConfig(r=run.rank, target_modules=[], target_parameters=TARGETS)
    with device:  # PEFT fills in adapters where they are made: on a CPU that takes a minute
        tuned = get_peft_model(model, lora, autocast_adapter_dtype=False)
    if way.by_us:
        use_lora_experts(tuned)
    for name, p in tuned.named_parameters():
        if p.requires_grad:
            if "lora_B" in name:  # zero at first, and with it the gradient of A
                nn.init.normal_(p, std=0.02)
            p.data = p.data.to(DTYPES[run.adapters])
    tuned.gradient_checkpointing_enable()
    return tuned.train()


def optimizer_of(trained: list[nn.Parameter], run: Run) -> tuple[Any, str]:
    """The optimizer, and what it is."""
    if run.adapters == "bf16":
        try:
            kind = _adam_in_8_bits(trained[0].device)
            return kind(trained, lr=1e-3), f"bitsandbytes {kind.__name__}"
        except Exception as error:  # absent, or without its library for this CUDA
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            print(f"no 8-bit Adam ({why})", file=sys.stderr)
    fused = trained[0].is_cuda
    name = f"torch AdamW, states in {run.adapters}" + ", fused" * fused
    return torch.optim.AdamW(trained, lr=1e-3, fused=fused), name


def _adam_in_8_bits(device: torch.device) -> Any:
    """That of bitsandbytes, after a step of it."""
    from bitsandbytes.optim import AdamW8bit

    trial = nn.Parameter(torch.ones(2**14, device=device, dtype=torch.bfloat16))
    trial.grad = torch.ones_like(trial)
    AdamW8bit([trial], lr=0.5).step()
    if not (trial < 1).all():
        raise RuntimeError("a step of AdamW8bit changed nothing")
    return AdamW8bit


Gradients = dict[str, list[torch.Tensor]]  # by the kind of adapter, of all layers


def measure(
    config: GptOssConfig, way: Way, run: Run, device: torch.device
) -> tuple[dict[str, Any], Gradients]:
    """What is recorded, and the gradients of the first step, on the CPU."""
    torch.manual_seed(0)
    begin = time.perf_counter()
    model = frozen_model(config, way, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    weights = sum(_bytes(p) for p in model.parameters())
    tuned = with_adapters(model, way, run, device)
    trained = [p for p in tuned.parameters() if p.requires_grad]
    optimizer, name = optimizer_of(trained, run)
    ids = torch.randint(config.vocab_size, (run.tokens // CONTEXT, CONTEXT + 1), device=device)
    inputs, targets = ids[:, :-1], ids[:, 1:].flatten()
    head: torch.Tensor = model.lm_head.weight  # type: ignore[assignment, union-attr]
    made, losses, seconds = time.perf_counter() - begin, [], []
    gradients: Gradients = {}
    for _ in range(STEPS):
        begin = time.perf_counter()
        with torch.autocast(device.type, DTYPE, enabled=DTYPE.itemsize == 2):
            # Without a cache of keys and values, which training has no use for.
            hidden = model.model(inputs, use_cache=False).last_hidden_state  # type: ignore
            loss = linear_cross_entropy(hidden.flatten(0, 1), head, targets, LOGITS)
        loss.backward()
        gradients = gradients or by_kind(tuned)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
        seconds.append(round(time.perf_counter() - begin, 3))
    found = {
        **run._asdict(), "optimizer": name, "weights GiB": _gib(weights),
        "trained": sum(p.numel() for p in trained), "losses": losses, "seconds": seconds,
        "seconds before": round(made, 1),
    }  # fmt: skip
    if device.type == "cuda":
        found["max_memory_reserved GiB"] = _gib(torch.cuda.max_memory_reserved())
        found["max_memory_allocated GiB"] = _gib(torch.cuda.max_memory_allocated())
    return found, gradients


def by_kind(tuned: nn.Module) -> Gradients:
    found: Gradients = {}
    for name, p in tuned.named_parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            found.setdefault(re.sub(r"\d+", "", name), []).append(gradient.cpu())
    return found


def difference(got: Gradients, expected: Gradients) -> float:
    """The largest relative one of the kinds; NaN if something is not finite."""
    found = []
    for kind, wanted in expected.items():
        error, norm = norms(got[kind], wanted)
        found.append(error.norm() / norm.norm())
    return torch.stack(found).max().item()


def by_layer(got: Gradients, expected: Gradients) -> str:
    """The relative difference of each kind in each layer."""
    lines = []
    for kind, wanted in expected.items():
        error, norm = norms(got[kind], wanted)
        lines.append(f"  {kind}: " + " ".join(f"{each:.2g}" for each in (error / norm).tolist()))
    return "\n".join(lines)


def norms(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the difference and of what was wanted, by layer."""
    pairs = [(g.float(), w.float()) for g, w in zip(got, wanted, strict=True)]
    error = torch.stack([(g - w).norm() for g, w in pairs])
    return error, torch.stack([w.norm() for _, w in pairs])


def _bytes(p: torch.Tensor) -> int:
    return p.packed.nbytes if isinstance(p, PackedParameter) else p.nbytes


def _gib(size: int) -> float:
    return round(size / 2**30, 2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(MODELS)
    parser.add_argument("--model", choices=names, default=names[0], help=f"default: {names[0]}")
    ways = list(WAYS)
    words = f"of {', '.join(ways)}; all; default: {ways[0]}"
    parser.add_argument("--ways", nargs="+", default=ways[:1], metavar="WAY", help=words)
    words = f"TOKENS,RANK,ADAPTERS; default: {RUNS}"
    parser.add_argument("--runs", nargs="+", default=RUNS.split(), metavar="RUN", help=words)
    parser.add_argument("--peers", metavar="FOLDER", help="with bitsandbytes, unpacked")
    records.add_options(parser)
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    runs = [Run.of(text) for text in args.runs]
    ways = ways if args.ways == ["all"] else args.ways
    for way in ways:
        if way not in WAYS:
            raise SystemExit(f"--ways: expected some of {', '.join(WAYS)}, or all, got {way}")
    if args.peers:
        sys.path.append(args.peers)
    register()
    register("in_fp8", precision="fp8")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    command = records.command("packed_model.py", given, ["--peers"])
    made = records.Records("packed model", device, command, args)
    config = GptOssConfig(**MODELS[args.model])
    refused = []
    for run in runs:
        expected: Gradients = {}
        for way in ways:
            found, gradients = measure(config, WAYS[way], run, device)
            expected = expected or gradients
            differs = difference(gradients, expected)
            if differs <= DIFFERENCE:
                about = {"model": args.model, "way": way, "difference": float(f"{differs:.2g}")}
                made.keep(about | found)
            else:
                refused.append(f"{way}: gradients differ by {differs:.2f} from {ways[0]}")
                print(refused[-1], by_layer(gradients, expected), sep="\n", file=sys.stderr)
            del gradients
            gc.collect()  # modules refer to each other
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    if refused:
        raise SystemExit("\n".join(refused))


if __name__ == "__main__":
    main()
