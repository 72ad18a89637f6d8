"""Times training steps of `sonicmoe train`'s own classes, or keeps every loss of a short training.

python benchmarks/training_step.py --preset 7B --precision bf16 --micro-batches 16 --steps 2
python benchmarks/training_step.py --preset 7B --backend scattermoe --peers FOLDER --layers 8
python benchmarks/training_step.py --preset 7B --precision bf16_fp8 --curve 300 --tokens FILE
python benchmarks/training_step.py --redraw
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from research import records, training_step, training_step_report

from sonicmoe.validation import check_writable
from sonicmoe_trainer import accounting
from sonicmoe_trainer.backends import BACKENDS, check_backend
from sonicmoe_trainer.config import PRECISIONS, TrainConfig, parse_assignments
from sonicmoe_trainer.presets import PRESETS, preset


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="7B", choices=PRESETS)
    parser.add_argument("--precision", choices=PRECISIONS, help="default: the preset's")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--micro-batches", type=int, default=16, help="per optimizer step")
    parser.add_argument("--steps", type=int, default=2, help="that are timed")
    words = "train with fewer; the time of the preset's number is then extrapolated"
    parser.add_argument("--layers", type=int, metavar="N", help=words)
    words = "keep the losses of N steps of one micro-batch, instead of times"
    parser.add_argument("--curve", type=int, metavar="N", help=words)
    words = "train.tokens of a prepared corpus, or its begin; default: random tokens"
    parser.add_argument("--tokens", type=Path, metavar="FILE", help=words)
    words = "folder with the packages to compare with"
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help=words)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--deterministic", action="store_true", help="attention that repeats")
    words = "any other setting of a training"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=words)
    words = "only write the table and the picture of the kept records"
    parser.add_argument("--redraw", action="store_true", help=words)
    records.add_options(parser)
    return parser.parse_args(argv)


def configuration(args: argparse.Namespace) -> TrainConfig:
    values: dict[str, Any] = parse_assignments(args.set)
    values |= {"backend": args.backend, "deterministic": args.deterministic}
    for key, value in (("precision", args.precision), ("compile", args.compile)):
        if value is not None:
            values[key] = value
    if args.layers:
        values["num_layers"] = args.layers
    base = preset(args.preset).override({"keep": 0, "tensorboard": False, **values})
    if args.curve:
        return base.override({"steps": args.curve, "batch": base.micro_batch})
    return base.override({"batch": args.micro_batches * base.micro_batch})


def run(args: argparse.Namespace) -> dict[str, Any]:
    config = configuration(args)
    check_backend(config.backend, config)
    record: dict[str, Any] = {
        "kind": "training curve" if args.curve else "training step",
        "preset": config.preset,
        "precision": config.precision,
        "backend": config.backend,
        "deterministic": config.deterministic,
        "compile": config.compile,
        "recompute": config.recompute,
        "memory": config.memory,
    }
    torch.manual_seed(config.seed)
    tokens = training_step.read_tokens(args.tokens, config)
    record["text"] = "given" if args.tokens else "random"
    try:
        if args.curve:
            return record | training_step.curve(config, tokens, print)
        record |= training_step.measure(config, tokens, args.steps)
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        return record | {"layers": config.model.num_layers, "failed": f"out of memory: {first}"}
    whole = PRESETS[config.preset].model.num_layers
    if whole != config.model.num_layers and "parts_ms" in record:
        record["extrapolated"] = training_step.extrapolated(record, config, whole)
    return record


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = parse_args(given)
    check_writable("--results", args.results)
    if args.redraw:
        print(training_step_report.report(args.results))
        return 0
    if args.peers:
        sys.path.insert(0, str(args.peers))
    device = "cuda" if torch.cuda.is_available() and "device=cpu" not in args.set else "cpu"
    command = records.command("training_step.py", given, ["--peers", "--tokens"])
    made = records.Records("training step", device, command, args)
    found = {"peak_flops": accounting.peak_flops(made.about["device"])} | run(args)
    made.keep(found, unshown=("losses", "norms", "kernels_ms"))
    return 1 if "failed" in found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"training_step.py: {error}")
