"""Whole models of transformers with our experts: short trainings, and one OLMoE."""

import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from sonicmoe.layer.memory import MemoryPolicy
from sonicmoe.tools.tables import table
from sonicmoe.watch import watch

from .framework_options import NAME, Options, Outcome, release, say
from .results import Record
from .timing import is_cuda, wall_ms

# --- train ----------------------------------------------------------------------------------------
IMPLEMENTATIONS = (NAME, "eager", "grouped_mm")
MODELS: dict[str, dict] = {
    "Qwen3Moe": {"moe_intermediate_size": 512, "num_experts": 32, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 32, "sliding_window": 128},
}
LARGE = dict(
    vocab_size=2048, hidden_size=1024, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=8, head_dim=128, num_experts_per_tok=4,
)  # fmt: skip
TINY = dict(
    vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts_per_tok=2,
)  # fmt: skip


def train(options: Options) -> Outcome:
    """The same model and batches under each implementation. What strays from `eager` much more than
    `grouped_mm` does is wrong, and gets no figure."""
    records: list[Record] = []
    failures = []
    for model in MODELS:
        losses, times = {}, {}
        for implementation in IMPLEMENTATIONS:
            losses[implementation], times[implementation] = _train(model, implementation, options)
            release()
        strays = {
            name: max(abs(a - b) for a, b in zip(curve, losses["eager"], strict=True))
            for name, curve in losses.items()
        }
        if not strays[NAME] <= 2 * strays["grouped_mm"] + 0.02:  # NaN fails
            failures.append(f"{model}: losses differ from eager's by up to {strays[NAME]:.3f}")
            continue
        rows: list[list] = [
            [step + 1, *(losses[name][step] for name in IMPLEMENTATIONS)]
            for step in range(options.steps)
        ]
        rows += [["ms a step", *times.values()], ["off eager", *strays.values()]]
        print(f"\n{model}, {options.dtype}: loss\n{table(('step', *IMPLEMENTATIONS), rows)}")
        records += [
            {"part": "train", "case": model, "candidate": name, "losses": losses[name],
             "step_ms": times[name], "off_eager": strays[name]}
            for name in IMPLEMENTATIONS
        ]  # fmt: skip
    return Outcome(records, failures)


def _train(name: str, implementation: str, options: Options) -> tuple[list[float], float]:
    import transformers

    from sonicmoe.integrations.transformers import register

    register()
    sizes = MODELS[name] | (TINY if options.tiny else LARGE)
    if options.tiny:
        sizes |= {key: 8 for key in sizes if key in ("num_experts", "num_local_experts")}
        sizes |= {key: 16 for key in sizes if key == "moe_intermediate_size"}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, pad_token_id=0)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_experts_implementation(implementation)
    model = model.to(options.device, options.dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    times: list[float] = []
    for batch in _batches(sizes["vocab_size"], options):

        def step(batch=batch) -> None:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        times.append(wall_ms(step, options.device))
        if len(times) % 5 == 0:
            say(f"{name}, {implementation}: step {len(times)}, loss {losses[-1]:.3f}")
    return losses, statistics.median(times[options.steps // 4 :])  # the first ones compile


def _batches(vocabulary: int, options: Options) -> Iterator[torch.Tensor]:
    """Tokens that follow from the one before, so that there is something to learn."""
    rows, length = (2, 16) if options.tiny else (8, 1024)
    generator = torch.Generator().manual_seed(1)
    for _ in range(options.steps):
        tokens = [torch.randint(vocabulary, (rows,), generator=generator)]
        for _ in range(length - 1):
            tokens.append((5 * tokens[-1] + 7) % vocabulary)
        yield torch.stack(tokens, 1).to(options.device)


# --- model ----------------------------------------------------------------------------------------
# transformers' default sizes have experts twice as wide as those of OLMoE-1B-7B.
OLMOES = {"OLMoE-1B-7B": {"intermediate_size": 1024}, "OlmoeConfig()": {}}
IN_FP8: dict[str, dict[str, Any]] = {
    "sonicmoe_fp8": {},
    "sonicmoe_fp8_weights_recomputed": {"memory": MemoryPolicy(weights="recompute")},
    "sonicmoe_fp8_weights_kept": {"cache_fp8_weights": True},
}


def model(options: Options) -> Outcome:
    """Random weights, 4 sequences of 4096 tokens, no checkpointing, no optimizer; interleaved."""
    from sonicmoe.integrations.transformers import register

    register()
    names = [NAME, f"{NAME}, watched"]
    if options.dtype == torch.bfloat16:
        for name, how in IN_FP8.items():
            register(name, precision="fp8", **how)
        names += IN_FP8
    records = []
    for case, sizes in OLMOES.items():
        sizes = TINY | {"num_experts": 8} if options.tiny else sizes
        # The wider one only shows what its memory consists of.
        of_case = [*names, "grouped_mm"] if case == next(iter(OLMOES)) else names
        records += _model(case, sizes, of_case, options)
        release()
    return Outcome(records, [])


def _model(case: str, sizes: dict[str, Any], names: list[str], options: Options) -> list[Record]:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    config = OlmoeConfig(**sizes)
    with torch.device(options.device):
        olmoe = OlmoeForCausalLM(config).to(options.dtype).train()
        ids = torch.randint(config.vocab_size, (2, 16) if options.tiny else (4, 4096))

    def step() -> None:
        olmoe(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        olmoe.zero_grad(set_to_none=True)

    times: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    for _ in range(3):
        for name in names:
            olmoe.set_experts_implementation(name.split(",")[0])
            watched = watch(olmoe) if name.endswith("watched") else nullcontext()
            with watched:
                step()  # compiles
                reset_peak(options.device)
                times.setdefault(name, []).extend(wall_ms(step, options.device) for _ in range(3))
            peaks[name] = peak_mib(options.device)
            for module in olmoe.modules():
                if (kept := getattr(module, "sonicmoe_fp8_weights", None)) is not None:
                    kept.clear()  # else the others hold it
    shape = f"{ids.numel()} tokens, {config.num_hidden_layers} layers"
    shape += f", I = {config.intermediate_size}"
    records: list[Record] = [
        {"part": "model", "case": case, "shape": shape, "candidate": name,
         "fwd_bwd_ms": round(statistics.median(found), 1), "peak_mib": peaks[name]}
        for name, found in times.items()
    ]  # fmt: skip
    rows = [[r["candidate"], f"{r['fwd_bwd_ms']:.1f}", f"{r['peak_mib']:.0f}"] for r in records]
    print(f"\n{case}: {shape}\n{table(('candidate', 'fwd+bwd ms', 'peak MiB'), rows)}")
    return records


def reset_peak(device: str) -> None:
    if is_cuda(device):
        torch.cuda.reset_peak_memory_stats()


def peak_mib(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if is_cuda(device) else 0.0
