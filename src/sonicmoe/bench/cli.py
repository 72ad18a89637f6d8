"""`sonicmoe bench`, `sonicmoe verify`, `sonicmoe tune` and `sonicmoe cost`."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import cost
from ..enums import ActivationType
from ..errors import bad_argument
from .cases import CASES, HOST, ROUTERS, SUITES, Case, find_case
from .products import NAMES

if TYPE_CHECKING:
    from .run import Options, Outcome

DTYPES = ("bfloat16", "float16", "float32")


def register(subparsers) -> None:
    bench = subparsers.add_parser(
        "bench", help="time the layer beside dense cuBLAS; every result is verified first"
    )
    add_selection(bench)
    add_device(bench)
    add_results(bench)
    bench.add_argument("--host", action="store_true", help="also host time per call, or only that")
    bench.add_argument("--cold", action="store_true", help="also the first call with empty caches")
    bench.add_argument(
        "--modes", action="store_true",
        help="also checkpointed, frozen experts, main_grad, autocast, compiled",
    )  # fmt: skip
    bench.add_argument(
        "--no-times", action="store_true", help="only what --host, --cold and --modes ask for"
    )
    bench.add_argument("--list", action="store_true", help="print the named cases")
    bench.set_defaults(run=run_bench)

    verify = subparsers.add_parser(
        "verify", help="check the output and every gradient against fp64"
    )
    add_selection(verify)
    add_device(verify)
    verify.set_defaults(run=run_verify)

    tune = subparsers.add_parser(
        "tune", help="measure kernel configurations for given shapes and use the best from then on"
    )
    add_selection(tune, routings=False)
    add_device(tune)
    tune.add_argument(
        "--product", action="append", choices=NAMES, help="one of a layer's six GEMMs; default: all"
    )
    tune.add_argument(
        "--out", type=Path, metavar="FILE",
        help="table to write; $SONICMOE_TUNED or ~/.cache/sonicmoe/tuned-<device>.json",
    )  # fmt: skip
    tune.add_argument("--results", type=Path, metavar="FOLDER", help="keep all measurements there")
    tune.add_argument("--commit", help="of the source, where there is no git repository")
    tune.set_defaults(run=run_tune)

    costs = subparsers.add_parser("cost", help="FLOPs, bytes, traffic and roofline time of a shape")
    add_selection(costs, routings=False)
    costs.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    costs.add_argument("--gpu", default="h200", help=", ".join(cost.GPUS))
    costs.add_argument("--tile-m", type=int, metavar="M", help="128, in float32 32")
    costs.set_defaults(run=run_cost)


# --- arguments ------------------------------------------------------------------------------------
def add_selection(parser: argparse.ArgumentParser, routings: bool = True) -> None:
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="a named case")
    parser.add_argument("--shape", action="append", default=[], metavar="T,H,I,E,K")
    parser.add_argument("--suite", choices=SUITES, help="a set of named cases")
    parser.add_argument(
        "--activation", help="with --shape", choices=[a.value for a in ActivationType]
    )
    parser.add_argument("--bias", action="store_true", help="with --shape")
    parser.add_argument("--router", choices=ROUTERS, help="with --shape")
    if routings:
        parser.add_argument("--routing", nargs="+", default=["uniform"], metavar="uniform|zipf|hot")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--gate-up", choices=("interleaved", "concatenated"), default="interleaved")


def add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernels", action="store_true", help="also each operator and each kernel")
    parser.add_argument("--no-verify", action="store_true", help="skip the checks; nothing is kept")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="default: benchmarks/results"
    )
    parser.add_argument("--commit", help="of the source, where there is no git repository")
    parser.add_argument("--label", default="layer", help="end of the name of the results file")


def selected_cases(args: argparse.Namespace) -> list[Case]:
    """Suites, named cases, shapes, in this order; the grid if nothing was named."""
    given = [name for name in ("activation", "bias", "router") if getattr(args, name)]
    if given and not args.shape:
        raise bad_argument(
            f"--{given[0]}", "--shape beside it", "named cases alone",
            "A named case brings its own; give its sizes with --shape to change them.",
        )  # fmt: skip
    cases = list(SUITES[args.suite]) if args.suite else []
    cases += [find_case(name) for name in args.case]
    activation = ActivationType(args.activation or "swiglu")
    router = args.router or "softmax_over_topk"
    cases += [Case.of_shape(text, activation, args.bias, router) for text in args.shape]
    return cases or list(SUITES["grid"])


def options_of(args: argparse.Namespace, **more) -> "Options":
    import torch

    from .run import Options
    from .timing import is_cuda

    on_gpu = is_cuda(args.device)
    if on_gpu and not torch.cuda.is_available():
        raise bad_argument(
            "--device", "a device that is here", args.device, "Without a GPU: --device cpu."
        )
    return Options(
        device=args.device,
        dtype=getattr(torch, args.dtype or ("bfloat16" if on_gpu else "float32")),
        gate_up=args.gate_up,
        **more,
    )


# --- commands -------------------------------------------------------------------------------------
def run_bench(args: argparse.Namespace) -> int:
    from . import results
    from .run import bench_case, verify_case
    from .tables import table

    if args.list:
        rows = [
            [c.name, str(c.problem), c.activation.value, c.router, c.note] for c in CASES.values()
        ]
        print(table(("case", "T,H,I,E,K", "activation", "router", "note"), rows))
        return 0
    options = options_of(args, check=not args.no_verify, kernels=args.kernels)
    only_extras = _only_extras(args)
    origin = results.provenance(args.device, command(args), args.commit)
    failures: list[str] = []
    if not only_extras:
        failures = measure_cases(args, options, origin, bench_case)
    elif options.check:
        for case in _cases_of_extras(args):
            failures += verify_case(case, "uniform", options).failures
    extras = [] if failures else _extra_measurements(args, options)
    if options.check:
        keep([origin | record for record in extras], args)
    return finish(failures)


def measure_cases(
    args: argparse.Namespace,
    options: "Options",
    origin: dict,
    measure: "Callable[[Case, str, Options], Outcome]",
) -> list[str]:
    """Measure every selected case under every routing; keep the records, return the failures."""
    from . import report

    records, failures = [], []
    for case in selected_cases(args):
        for routing in args.routing:
            outcome = measure(case, routing, options)
            records += outcome.records
            failures += outcome.failures
            if options.check:
                keep([origin | record for record in outcome.records], args)
    skew = report.skew_table(records)
    if skew:
        print(f"\n{skew}")
    return failures


def check_apart_from_times(args: argparse.Namespace, flag: str, flags: Sequence[str]) -> None:
    """Refuse `flag` together with flags that only concern times."""
    for name in flags:
        if getattr(args, name):
            raise bad_argument(
                flag, "no flag that is about times beside it",
                f"--{name.replace('_', '-')}", "Measure the two one after the other.",
            )  # fmt: skip


def _cases_of_extras(args: argparse.Namespace) -> list[Case]:
    """The cases that `_extra_measurements` runs."""
    selected = selected_cases(args) if args.cold or args.modes else []
    return ([HOST] if args.host else []) + selected


def _only_extras(args: argparse.Namespace) -> bool:
    """True with --no-times, and for --host without any flag that would need a case."""
    if args.no_times:
        check_apart_from_times(args, "--no-times", ("kernels",))
        if not _cases_of_extras(args):
            raise bad_argument(
                "--no-times",
                "--host, --cold or --modes beside it",
                "none",
                "Leave it out for times.",
            )
        if args.routing != ["uniform"]:
            raise bad_argument(
                "--no-times", "uniform routing", " ".join(args.routing), "Leave --routing out."
            )
        return True
    needs_case = ("suite", "case", "shape", "cold", "modes", "kernels")
    plain = args.routing == ["uniform"] and not any(getattr(args, name) for name in needs_case)
    return args.host and plain


def _extra_measurements(args: argparse.Namespace, options: "Options") -> list[dict]:
    from . import report
    from .cold import measure_cold
    from .host import measure_host
    from .modes import measure_modes
    from .run import about_case

    interleaved = replace(options, gate_up="interleaved")  # the only layout these three know
    records = []
    if args.host:
        found = measure_host(args.device, options.dtype)
        print(f"\nhost time\n{report.figure_table(found)}")
        records.append(about_case(HOST, interleaved) | {"candidate": "host"} | found)
    if args.cold:
        for case in selected_cases(args):
            dtype = str(options.dtype).removeprefix("torch.")
            found = measure_cold(case, args.device, dtype)
            print(f"\ncold start, {case.name}\n{report.figure_table(found)}")
            records.append(about_case(case, interleaved) | {"candidate": "cold"} | found)
    if args.modes:
        for case in selected_cases(args):
            found = measure_modes(case, args.device, options.dtype)
            print(f"\nmodes, {case.name}\n{report.figure_table(found)}")
            records.append(about_case(case, interleaved) | {"candidate": "modes"} | found)
    return records


def run_verify(args: argparse.Namespace) -> int:
    from .run import verify_case

    options = options_of(args)
    failures = []
    for case in selected_cases(args):
        for routing in args.routing:
            failures += verify_case(case, routing, options).failures
    return finish(failures)


def run_tune(args: argparse.Namespace) -> int:
    import torch

    from . import results, tune_run
    from .timing import is_cuda

    if not (is_cuda(args.device) and torch.cuda.is_available()):
        raise bad_argument(
            "--device", "a GPU that is here", args.device,
            "Configurations are measured on the GPU that will run them: start it there. "
            "`sonicmoe doctor` says what this machine lacks.",
        )  # fmt: skip
    if not (args.case or args.shape or args.suite):
        raise bad_argument(
            "--case", "the shapes to tune for", "none",
            "Name some: --case olmoe, or --shape T,H,I,E,K.",
        )  # fmt: skip
    outcome = tune_run.tune_cases(
        selected_cases(args), options_of(args), args.product or NAMES, args.out
    )
    if args.results:
        origin = results.provenance(args.device, command(args), args.commit)
        args.label = "tune"
        keep([origin | record for record in outcome.records], args)
    return finish(outcome.failures)


def run_cost(args: argparse.Namespace) -> int:
    from ..tuning.config import tile_m
    from .cost_report import cost_report

    gpu = cost.find_gpu(args.gpu)
    itemsize = 4 if args.dtype == "float32" else 2
    m = args.tile_m or tile_m(itemsize)
    for case in selected_cases(args):
        print(cost_report(case, gpu, itemsize, m))
    return 0


# --- shared ---------------------------------------------------------------------------------------
def command(args: argparse.Namespace) -> str:
    return shlex.join(["sonicmoe", *args.argv])


def keep(records: list[dict], args: argparse.Namespace) -> None:
    from . import results

    path = results.write(records, args.results or results.RESULTS, args.label)
    if path is not None:
        print(f"kept {len(records)} records in {path}", file=sys.stderr)


def finish(failures: list[str]) -> int:
    for failure in failures:
        print(f"\nFAILED {failure}\nNo figure is given for it.", file=sys.stderr)
    return 1 if failures else 0
