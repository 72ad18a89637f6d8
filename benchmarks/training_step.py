"""Times training steps of `sonicmoe train`'s own classes, or keeps every loss of a short training.

python benchmarks/training_step.py --preset 7B --precision bf16 --micro-batches 16 --steps 2
python benchmarks/training_step.py --preset 7B --backend scattermoe --peers FOLDER --layers 8
python benchmarks/training_step.py --preset 7B --precision bf16_fp8 --curve 300 --tokens FILE
python benchmarks/training_step.py --redraw
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from research import training_step, training_step_report

from sonicmoe.bench.results import RESULTS, provenance, write
from sonicmoe.train import hardware
from sonicmoe.train.backends import BACKENDS, check_backend
from sonicmoe.train.config import PRECISIONS, TrainConfig, parse_assignments
from sonicmoe.train.presets import PRESETS, preset
from sonicmoe.validation import check_writable

# Not part of the command that is kept: they do not change what is measured.
PRIVATE = ("--results", "--commit", "--peers", "--tokens")


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
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--commit", help="of the source, where there is no git repository")
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
    record = provenance(device, _command(given), args.commit) | run(args)
    known = hardware.recognise(record["device"])
    record["peak_flops"] = known.half if known else None
    shown = {k: v for k, v in record.items() if k not in ("losses", "norms", "kernels_ms")}
    print(json.dumps(shown))
    write([record], args.results, "training-step")
    return 1 if "failed" in record else 0


def _command(given: Sequence[str]) -> str:
    """This command; paths of one machine are left out or called FOLDER and FILE."""
    kept, words = [], iter(given)
    for word in words:
        name, sign, _ = word.partition("=")
        if name not in PRIVATE:
            kept.append(word)
            continue
        if not sign:
            next(words, None)
        if name in ("--peers", "--tokens"):
            kept += [name, "FOLDER" if name == "--peers" else "FILE"]
    return shlex.join(["python", "benchmarks/training_step.py", *kept])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"training_step.py: {error}")
