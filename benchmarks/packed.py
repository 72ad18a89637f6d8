"""LoRA on frozen experts in bf16, FP8 and packed: a step of one layer, interleaved, as JSON lines.

    python benchmarks/packed.py

A step is forward and backward with gradients for X, the scores and both adapters. FP8 quantizes
weights in bf16 in every call, or keeps them. Packed weights are decoded to bf16 or to e4m3 before
every GEMM. Their output and gradients are compared first: they have the bits of the same step on
weights that were decoded before.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from packed_random import FORMATS, random_packed
from research import records
from research.timing import interleaved

from sonicmoe import ActivationType, Fp8Weights, LowRank, experts

WARMUP = 4  # steps before the first round
TURN = 0.25  # seconds until the clocks have settled, and again to be timed


class Layer(NamedTuple):
    sizes: tuple[int, int, int, int]  # H, I, E, K
    activation: ActivationType
    biases: bool


LAYERS = {
    "qwen3-30b": Layer((2048, 768, 128, 8), ActivationType.SWIGLU, False),
    "gpt-oss-20b": Layer((2880, 2880, 32, 4), ActivationType.SWIGLU_CLAMPED, True),
}
Weights = tuple[Any, Any]
Step = Callable[..., dict[str, torch.Tensor]]


def step_of(layer: Layer, tokens: int, rank: int) -> Step:
    """A step with w1, w2 and options; it returns output and gradients."""
    (H, I, E, K), activation, biases = layer
    torch.manual_seed(0)

    def new(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale

    x, dout = new(tokens, H), new(tokens, H)
    b1, b2 = (new(E, 2 * I), new(E, H)) if biases else (None, None)
    lora1 = LowRank(new(rank * E, H, scale=H**-0.5), new(2 * I, rank * E, scale=0.1))
    lora2 = LowRank(new(rank * E, I, scale=I**-0.5), new(H, rank * E, scale=0.1))
    scores, ids = torch.rand(tokens, E, device="cuda").softmax(1).topk(K, 1)
    names = ("x", "scores", "a1", "b1", "a2", "b2")
    leaves = (x, scores, lora1.a, lora1.b, lora2.a, lora2.b)
    for leaf in leaves:
        leaf.requires_grad_()

    def step(w1: Any, w2: Any, **options: Any) -> dict[str, torch.Tensor]:
        out = experts(
            x, ids, scores, w1, w2, b1, b2, lora1=lora1, lora2=lora2, activation=activation,
            **options,
        )  # fmt: skip
        out.backward(dout)
        found = {f"d{name}": leaf.grad for name, leaf in zip(names, leaves, strict=True)}
        for leaf in leaves:
            leaf.grad = None
        return {"out": out.detach(), **found}  # type: ignore[dict-item]

    return step


def shapes_of(layer: Layer) -> list[tuple[int, int, int]]:
    H, I, E, _ = layer.sizes
    return [(E, 2 * I, H), (E, H, I)]


def check(step: Step, weights: Weights) -> list[str]:
    """What has other bits than with weights that were decoded before."""
    dense = [w.dequantize() for w in weights]
    different = []
    for precision in (None, "fp8"):
        found, wants = (step(*ws, precision=precision) for ws in (weights, dense))
        different += [f"{k}, {precision}" for k in wants if not torch.equal(found[k], wants[k])]
    return different


def milliseconds(step: Callable[[], Any]) -> float:
    """Of a step, once the GPU has been busy with it: at its power limit, a kernel that follows
    cooler ones runs up to 10% faster for a while."""
    steps = max(1, round(TURN / (_seconds(step, 2) / 2)))
    _seconds(step, steps)
    return 1e3 * _seconds(step, steps) / steps


def _seconds(step: Callable[[], Any], steps: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(name: str, tokens: int, rank: int, rounds: int, formats: list[str]) -> dict[str, Any]:
    layer, kept = LAYERS[name], {}
    step, shapes = step_of(layer, tokens, rank), shapes_of(layer)
    packed, wrong = {}, {}
    for format in formats:
        weights = tuple(random_packed(format, shape).for_fp8() for shape in shapes)
        if different := check(step, weights):
            wrong[format] = different  # and is not timed
            continue
        packed[format], kept[format] = weights, sum(w.nbytes for w in weights)
    dense = [
        torch.randn(shape, device="cuda").mul_(shape[2] ** -0.5).bfloat16() for shape in shapes
    ]
    of_dense = Fp8Weights()
    steps: dict[str, Callable[[], Any]] = {
        "bf16": lambda: step(*dense),
        "FP8": lambda: step(*dense, precision="fp8"),
        "FP8, weights kept": lambda: step(*dense, precision="fp8", fp8_weights=of_dense),
    }
    for format, weights in packed.items():
        steps[f"{format} to bf16"] = lambda w=weights: step(*w)
        steps[f"{format} to e4m3"] = lambda w=weights: step(*w, precision="fp8")
    for run in steps.values():
        for _ in range(WARMUP):
            run()
    medians = interleaved(
        {label: partial(milliseconds, run) for label, run in steps.items()}, rounds
    )
    of_bf16 = {label: round(ms / medians["bf16"], 3) for label, ms in medians.items()}
    in_bf16 = sum(w.nbytes for w in dense)
    memory = {format: round(size / in_bf16, 3) for format, size in kept.items()}
    found = {"layer": name, "tokens": tokens, "rank": rank, "ms": medians, "÷ bf16": of_bf16}
    return {**found, "bytes ÷ bf16": memory, "other bits than decoded weights": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--tokens", default="4096,32768")
    parser.add_argument("--formats", default="mxfp4,nf4,fp8,int4", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    records.add_options(parser)
    args = parser.parse_args()
    command = records.command("packed.py", sys.argv[1:])
    made = records.Records("packed", "cuda", command, args)
    for name in args.layers.split(","):
        for tokens in map(int, args.tokens.split(",")):
            made.keep(measure(name, tokens, args.rank, args.rounds, args.formats.split(",")))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
