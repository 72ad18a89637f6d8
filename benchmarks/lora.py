"""LoRA on frozen experts, bf16 beside FP8: a step of one layer, interleaved, as JSON lines.

    python benchmarks/lora.py

A step is forward and backward with gradients for X, the scores and both adapters. FP8 quantizes
the weights in every call, or keeps them.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from sonicmoe import ActivationType, Fp8Weights, experts
from sonicmoe.integrations.lora import LowRank

STEPS, WARMUP = 6, 8  # of a round, and before the first round


class Layer(NamedTuple):
    sizes: tuple[int, int, int, int, int]  # T, H, I, E, K
    activation: ActivationType
    biases: bool


LAYERS = {
    "qwen3-30b": Layer((32768, 2048, 768, 128, 8), ActivationType.SWIGLU, False),
    "gpt-oss-20b": Layer((32768, 2880, 2880, 32, 4), ActivationType.SWIGLU_CLAMPED, True),
}


def steps_of(layer: Layer, rank: int) -> dict[str, Callable[[], torch.Tensor]]:
    """A step of each variant; it returns the output."""
    (T, H, I, E, K), activation, biases = layer
    torch.manual_seed(0)

    def new(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale

    x, dout = new(T, H), new(T, H)
    w1, w2 = new(E, 2 * I, H, scale=H**-0.5), new(E, H, I, scale=I**-0.5)
    b1, b2 = (new(E, 2 * I), new(E, H)) if biases else (None, None)
    lora1 = LowRank(new(rank * E, H, scale=H**-0.5), new(2 * I, rank * E, scale=0.1))
    lora2 = LowRank(new(rank * E, I, scale=I**-0.5), new(H, rank * E, scale=0.1))
    scores, ids = torch.rand(T, E, device="cuda").softmax(1).topk(K, 1)
    leaves = [x, scores, lora1.a, lora1.b, lora2.a, lora2.b]
    for leaf in leaves:
        leaf.requires_grad_()

    def step(**options: Any) -> torch.Tensor:
        out = experts(
            x, ids, scores, w1, w2, b1, b2, lora1=lora1, lora2=lora2, activation=activation,
            **options,
        )  # fmt: skip
        out.backward(dout)
        for leaf in leaves:
            leaf.grad = None
        return out.detach()

    kept = Fp8Weights()
    return {
        "bf16": step,
        "FP8": lambda: step(precision="fp8"),
        "FP8, weights kept": lambda: step(precision="fp8", fp8_weights=kept),
    }


def milliseconds(step: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(STEPS):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / STEPS


def measure(name: str, rank: int, rounds: int) -> dict[str, Any]:
    steps = steps_of(LAYERS[name], rank)
    outputs = {label: step().float() for label, step in steps.items()}
    right = outputs["bf16"]
    errors = {k: round(float((o - right).norm() / right.norm()), 4) for k, o in outputs.items()}
    if max(errors.values()) > 0.08:
        raise SystemExit(f"{name}: FP8 is off by {errors}; nothing is timed")
    del outputs, right
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    times: dict[str, list[float]] = {label: [] for label in steps}
    for number in range(rounds):
        order = list(steps.items())
        for label, step in order if number % 2 == 0 else reversed(order):
            times[label].append(milliseconds(step))
    medians = {label: round(statistics.median(found), 4) for label, found in times.items()}
    faster = {label: round(medians["bf16"] / ms, 3) for label, ms in medians.items()}
    return {"layer": name, "rank": rank, "ms": medians, "bf16 ÷": faster, "output differs": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    about = {"date": datetime.now(UTC).isoformat(), "device": torch.cuda.get_device_name()}
    about |= {"torch": torch.__version__, "command": " ".join(sys.argv)}
    print(json.dumps(about), flush=True)
    for name in args.layers.split(","):
        print(json.dumps(measure(name, args.rank, args.rounds), ensure_ascii=False), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
