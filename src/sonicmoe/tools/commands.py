"""`sonicmoe verify`, `sonicmoe tune` and `sonicmoe cost`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import bad_argument
from ..layer.memory import KEEP, WEIGHT_POLICIES, Z_POLICIES, MemoryPolicy, memory_policy
from ..ops.kinds import precisions
from ..shapes import check_size
from ..validation import LAYOUTS, check_writable, parse_activation
from . import cost
from .cases import ON_CPU, ROUTERS, SUITES, Case, find_case
from .gemms import NAMES

if TYPE_CHECKING:
    from .verify_run import Options

DTYPES = ("bfloat16", "float16", "float32")


def register(subparsers) -> None:
    """Add the subcommands; each sets `run` to a function of the parsed arguments."""
    about = "check the output and every gradient against fp64"
    verify = _subparser(subparsers, "verify", about, run_verify)
    add_selection(verify)
    add_device(verify)
    drawn = "distribution of inputs and weights; trained: all but gaussian; an unknown name lists "
    drawn += "them; default: gaussian"
    names: dict[str, Any] = {"default": ["gaussian"], "metavar": "NAME"}
    verify.add_argument("--values", nargs="+", **names, help=drawn)

    about = "measure kernel configurations for given shapes and use the best from then on"
    tune = _subparser(subparsers, "tune", about, run_tune)
    add_selection(tune, routings=False)
    add_device(tune)
    gemms = "one of a layer's six GEMMs; default: all"
    tune.add_argument("--gemm", "--product", action="append", choices=NAMES, help=gemms)
    table = "table to write; $SONICMOE_TUNED or ~/.cache/sonicmoe/tuned-<device>.json"
    tune.add_argument("--out", type=Path, metavar="FILE", help=table)

    about = "FLOPs, bytes, traffic and roofline time of a shape"
    costs = _subparser(subparsers, "cost", about, run_cost)
    add_selection(costs, routings=False)
    costs.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    fp8 = "of the experts' GEMMs; default: that of --dtype"
    costs.add_argument("--precision", choices=precisions(), help=fp8)
    cards = f"one of {', '.join(cost.GPUS)}, or dense TFLOP/s and GB/s as in 165,1008"
    costs.add_argument("--gpu", default="h200", help=cards)
    policies = f"of Z: {', '.join(Z_POLICIES)}; default: {KEEP.z}"
    costs.add_argument("--memory", metavar="POLICY", default=KEEP.z, help=policies)
    costs.add_argument("--slices", type=int, default=1, help="of H in Y and dX; default: 1")
    weights = "of FP8 weights: keep or recompute their transposes; default: keep"
    costs.add_argument("--weights", choices=WEIGHT_POLICIES, default=KEEP.weights, help=weights)
    costs.add_argument("--tile-m", type=int, metavar="M", help="128, in float32 32")

    about = "moved to benchmarks/layer.py in a clone of the repository"
    moved = _subparser(subparsers, "bench", about, run_bench, prefix_chars="\0", add_help=False)
    moved.add_argument("arguments", nargs="*", help="any")


def _subparser(
    subparsers, name: str, about: str, run: Callable, **options
) -> argparse.ArgumentParser:
    description = f"{about[0].upper()}{about[1:]}. More: benchmarks/README.md of the repository."
    parser = subparsers.add_parser(name, help=about, description=description, **options)
    parser.set_defaults(run=run)
    return parser


# --- arguments ------------------------------------------------------------------------------------
def add_selection(parser: argparse.ArgumentParser, routings: bool = True) -> None:
    several: dict[str, Any] = {"action": "append", "default": []}
    named = "a named case; an unknown name lists them"
    parser.add_argument("--case", **several, metavar="NAME", help=named)
    parser.add_argument("--shape", **several, metavar="T,H,I,E,K", help="sizes of a layer")
    parser.add_argument("--suite", choices=SUITES, help="a set of named cases")
    parser.add_argument("--activation", metavar="NAME", help="with --shape; default: swiglu")
    parser.add_argument("--bias", action="store_true", help="with --shape")
    parser.add_argument("--router", choices=ROUTERS, help="with --shape")
    if routings:
        shares = "how evenly experts are chosen; default: uniform"
        kinds: dict[str, Any] = {"default": ["uniform"], "metavar": "uniform|zipf|hot"}
        parser.add_argument("--routing", nargs="+", **kinds, help=shares)


def add_device(parser: argparse.ArgumentParser) -> None:
    device = "cuda, cuda:1, … or cpu; default: the GPU, or the CPU if there is none"
    parser.add_argument("--device", help=device)
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 elsewhere")
    order = "order of the gate and up rows of W1; default: interleaved"
    parser.add_argument("--gate-up", choices=LAYOUTS, default=LAYOUTS[0], help=order)


def selected_cases(args: argparse.Namespace) -> list[Case]:
    """Suites, named cases, shapes, in this order.

    If nothing was named: the grid, or on a CPU one layer that takes seconds there.
    """
    given = [name for name in ("activation", "bias", "router") if getattr(args, name)]
    if given and not args.shape:
        remedy = "A named case has its own; pass its sizes with --shape to change them."
        raise bad_argument(f"--{given[0]}", "--shape with it", "named cases only", remedy)
    cases = list(SUITES[args.suite]) if args.suite else []
    cases += [find_case(name) for name in args.case]
    activation = parse_activation(args.activation or "swiglu", "--activation")
    router = args.router or "softmax_over_topk"
    cases += [Case.of_shape(text, activation, args.bias, router) for text in args.shape]
    if not cases and getattr(args, "device", None) == "cpu":
        return [ON_CPU]
    return cases or list(SUITES["grid"])


def options_of(args: argparse.Namespace) -> "Options":
    """Device, dtype and layout; checks all arguments before anything is measured.

    Without --device it is chosen here, and `args` then has it.
    """
    import torch

    from .inputs import ROUTINGS
    from .verify_run import Options

    chosen = args.device is None
    if chosen:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    _check_device(args.device)
    for routing in getattr(args, "routing", ()):
        if routing not in ROUTINGS:
            known = f"one of {', '.join(ROUTINGS)}"
            raise bad_argument("--routing", known, repr(routing), "Choose one.")
    cases = selected_cases(args)
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    if chosen and args.device == "cpu":
        note = "No GPU can be used: plain PyTorch on the CPU"
        note += f", one small layer ({ON_CPU.name})." if cases == [ON_CPU] else "."
        print(note, file=sys.stderr)
    return Options(args.device, getattr(torch, dtype), args.gate_up)


def _check_device(name: str) -> None:
    import torch

    try:
        device = torch.device(name)
        gpu = device.type == "cuda" and torch.cuda.is_available()
        gpu = gpu and (device.index is None or device.index < torch.cuda.device_count())
        here = device.type == "cpu" or gpu
    except RuntimeError:
        here = False
    if not here:
        remedy = "Without a GPU: --device cpu."
        raise bad_argument("--device", "cpu or a GPU of this machine", repr(name), remedy)


# --- commands ------------------------------------------------------------------------------------
def run_verify(args: argparse.Namespace) -> int:
    from .verify_run import verify_case

    options, values = options_of(args), _selected_values(args.values)
    failures = []
    for case in selected_cases(args):
        for routing in args.routing:
            for name in values:
                failures += verify_case(case, routing, options, name)
    return finish(failures)


def _selected_values(names: list[str]) -> list[str]:
    """The distributions that --values names, each once; `trained` stands for many."""
    from .values import TRAINED, VALUES

    found: list[str] = []
    for name in names:
        if name not in VALUES:
            known = f"one of {', '.join(VALUES)}"
            remedy = "trained stands for all but gaussian."
            raise bad_argument("--values", known, repr(name), remedy)
        found += TRAINED if name == "trained" else (name,)
    return list(dict.fromkeys(found))


def run_tune(args: argparse.Namespace) -> int:
    import torch

    from . import tune_run

    args.device = args.device or "cuda"
    if not (args.device.startswith("cuda") and torch.cuda.is_available()):
        remedy = "Run it on the GPU that will use the configurations. "
        remedy += "`sonicmoe doctor` says what this machine lacks."
        raise bad_argument("--device", "a GPU of this machine", args.device, remedy)
    if not (args.case or args.shape or args.suite):
        remedy = "Name some: --case olmoe, or --shape T,H,I,E,K."
        raise bad_argument("--case", "the shapes to tune for", "none", remedy)
    if args.out is not None:
        check_writable("--out", args.out.parent)
    cases = selected_cases(args)
    return finish(tune_run.tune_cases(cases, options_of(args), args.gemm or NAMES, args.out))


def run_cost(args: argparse.Namespace) -> int:
    from ..tuning.config import tile_m
    from .cost_report import cost_report

    itemsize = 4 if args.dtype == "float32" else 2
    m = tile_m(itemsize) if args.tile_m is None else args.tile_m
    check_size("--tile-m", m)
    if args.precision and args.dtype != "bfloat16":
        expected = f"bfloat16 with --precision {args.precision}"
        raise bad_argument("--dtype", expected, args.dtype, "Omit one of the two.")
    policy = memory_policy(MemoryPolicy(args.memory, args.slices, args.weights))
    gpu = _gpu(args.gpu, fp8=args.precision is not None or policy.in_e4m3)
    cases = selected_cases(args)
    print(*(cost_report(c, gpu, itemsize, m, policy, args.precision) for c in cases), sep="\n")
    return 0


def _gpu(text: str, fp8: bool) -> cost.Gpu:
    """A GPU by its name or its numbers, which do not say whether it has FP8."""
    gpu = cost.gpu_of_numbers(text)
    if gpu is not None and fp8:
        remedy = "Omit --precision and --memory e4m3, or name a GPU."
        raise bad_argument("--gpu", f"one of {', '.join(cost.GPUS)} with FP8", text, remedy)
    return gpu or cost.find_gpu(text)


def run_bench(args: argparse.Namespace) -> int:
    remedy = "In a clone of the repository run: python benchmarks/layer.py"
    raise bad_argument("command", "verify, tune or cost", "bench, which has moved", remedy)


def finish(failures: list[str]) -> int:
    for failure in failures:
        print(f"\nFAILED {failure}", file=sys.stderr)
    return 1 if failures else 0
