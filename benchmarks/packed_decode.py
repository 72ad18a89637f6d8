"""Decoders of packed weights: bits checked, then GB/s beside a plain copy, as JSON lines.

    python benchmarks/packed_decode.py

W1 of Qwen3-30B and gpt-oss-20b, decoded to bf16, to e4m3 and to the transpose in e4m3 that the
backward pass reads. Every configuration is measured; the fastest is printed last.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from packed_random import FORMATS, random_packed
from research import records

from sonicmoe.launch import packed as launch
from sonicmoe.launch.packed import Config
from sonicmoe.layer.precompile import compile_together
from sonicmoe.packed import PackedWeight, scales_and_norms
from sonicmoe.reference.packed import dequantize_weight, fp8_weight
from sonicmoe.tensors import Packed

LAYERS = {"qwen3-30b": (128, 1536, 2048), "gpt-oss-20b": (32, 5760, 2880)}
ROUNDS, STEPS, CHECKED = 5, 8, 2  # experts whose bits are compared
IN_ORDER = (Config(1024, 4), Config(512, 4), Config(2048, 8), Config(1024, 8), Config(512, 2))
TRANSPOSED = tuple(
    Config(tile=tile, tile_warps=warps)
    for tile, warps in (((128, 128), 8), ((128, 128), 4), ((128, 256), 8), ((64, 256), 4))
)
Decoder = Callable[[Packed, int, Config], torch.Tensor]


def decoders() -> dict[str, tuple[Decoder, tuple[Config, ...]]]:
    """What is timed, by destination: the packed weight, the number of experts, a configuration."""
    return {
        "bf16": (lambda w, n, c: launch.dequantize_weight(w, 0, n, torch.bfloat16, c), IN_ORDER),
        "e4m3": (lambda w, n, c: launch.quantize_packed(w, 0, n, c), IN_ORDER),
        "e4m3 transposed": (lambda w, n, c: launch.quantize_packed(w.mT, 0, n, c), TRANSPOSED),
    }


def on_meta(w: Packed) -> Packed:
    return w._replace(
        **{k: t.to("meta") for k, t in w._asdict().items() if isinstance(t, torch.Tensor)}
    )


def milliseconds(step: Callable[[], Any]) -> float:
    for _ in range(2):
        step()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / STEPS)
    return statistics.median(times)


def wrong_bits(w: PackedWeight, stored: Packed) -> list[str]:
    """Destinations whose bits are not those of plain PyTorch, in any configuration."""
    few = stored._replace(experts=CHECKED)
    right = {"bf16": dequantize_weight(few, 0, CHECKED, torch.bfloat16)}
    of_fp8 = few._replace(fp8_scale=stored.fp8_scale[:CHECKED])  # type: ignore[index]
    in_fp8 = fp8_weight(of_fp8)
    right |= {"e4m3": in_fp8.w8, "e4m3 transposed": in_fp8.w8_t}  # type: ignore[dict-item]
    found = []
    for name, (decode, configs) in decoders().items():
        for config in configs:
            got, want = decode(stored, CHECKED, config), right[name]
            if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
                found.append(f"{name} {config}")
    return found


def measure(layer: str, format: str) -> list[dict[str, Any]]:
    w = random_packed(format, LAYERS[layer])
    stored = w.stored()
    scale, norm = scales_and_norms(stored, "triton")
    stored = stored._replace(fp8_scale=scale, fp8_norm=norm)
    if wrong := wrong_bits(w, stored):
        raise SystemExit(f"{layer}, {format}: wrong bits, nothing is timed: {wrong}")
    lines = []
    for name, (decode, configs) in decoders().items():
        moved = w.nbytes + stored.shape.numel() * (2 if name == "bf16" else 1)
        half = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        other = torch.empty_like(half)
        copy = milliseconds(lambda other=other, half=half: other.copy_(half))
        del half, other
        times = {
            config: milliseconds(lambda c=config, d=decode: d(stored, stored.experts, c))
            for config in configs
        }
        best = min(times, key=times.__getitem__)
        lines.append(
            {
                "layer": layer, "format": format, "to": name, "ms": round(times[best], 4),
                "GB/s": round(moved / times[best] / 1e6), "of a copy": round(copy / times[best], 3),
                "configurations": {_words(c, name): round(t, 4) for c, t in times.items()},
                "best": _words(best, name),
            }
        )  # fmt: skip
    return lines


def _words(config: Config, name: str) -> str:
    if name == "e4m3 transposed":
        return f"{config.tile[0]}×{config.tile[1]}, {config.tile_warps} warps"
    return f"{config.block} words, {config.warps} warps"


def compile_all(layers: list[str], formats: list[str]) -> None:
    """All kernels side by side."""
    metas = []
    for layer in layers:
        _, n, k = LAYERS[layer]
        for format in formats:
            w = random_packed(format, (2, n, k)).stored()
            metas.append(on_meta(w._replace(fp8_scale=torch.ones(2))))

    def run() -> None:
        for w in metas:
            for decode, configs in decoders().values():
                for config in configs:
                    decode(w, 2, config)

    compile_together(run, torch.cuda.current_device())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--formats", default="mxfp4,nf4,fp8,int4", help=f"of {', '.join(FORMATS)}")
    records.add_options(parser)
    args = parser.parse_args()
    layers, formats = args.layers.split(","), args.formats.split(",")
    command = records.command("packed_decode.py", sys.argv[1:])
    made = records.Records("packed decode", "cuda", command, args)
    compile_all(layers, formats)
    for layer in layers:
        for format in formats:
            for line in measure(layer, format):
                made.keep(line)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
