"""`sonicmoe bench`, `sonicmoe verify`, `sonicmoe tune` and `sonicmoe cost`."""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from .. import cost
from ..enums import ActivationType
from ..errors import bad_argument
from .cases import CASES, HOST, ROUTERS, SUITES, Case, find_case
from .products import NAMES

DTYPES = ("bfloat16", "float16", "float32")


def register(subparsers) -> None:
    bench = subparsers.add_parser(
        "bench", help="time the layer and its peers; every figure is verified first"
    )
    _add_selection(bench)
    _add_device(bench)
    bench.add_argument(
        "--peers", nargs="*", metavar="NAME",
        help="dense, grouped_mm, scattermoe; all that can be imported unless named",
    )  # fmt: skip
    bench.add_argument(
        "--sonicmoe-path", metavar="FOLDER",
        help="folder with the published sonic-moe, measured in a process of its own",
    )  # fmt: skip
    bench.add_argument("--kernels", action="store_true", help="each operator and each kernel too")
    bench.add_argument(
        "--energy", action="store_true", help="power and energy of each product instead of times"
    )
    bench.add_argument("--host", action="store_true", help="time of the host too, or alone")
    bench.add_argument("--cold", action="store_true", help="first call with empty caches too")
    bench.add_argument(
        "--ways", action="store_true",
        help="checkpointed, frozen, with main_grad, under autocast, compiled too",
    )  # fmt: skip
    bench.add_argument(
        "--no-times", action="store_true", help="nothing but what --host, --cold and --ways ask for"
    )
    bench.add_argument("--no-verify", action="store_true", help="times without checks; not kept")
    bench.add_argument(
        "--results", type=Path, metavar="FOLDER", help="benchmarks/results if not named"
    )
    bench.add_argument("--commit", help="of the source, where it is no git repository")
    bench.add_argument("--label", default="layer", help="end of the name of the results file")
    bench.add_argument(
        "--report", nargs="?", type=Path, const=Path("README.md"), metavar="README",
        help="measure nothing; write the table of the kept results into README.md",
    )  # fmt: skip
    bench.add_argument("--list", action="store_true", help="print the named cases")
    bench.set_defaults(run=run_bench)

    verify = subparsers.add_parser(
        "verify", help="check the output and every gradient against fp64"
    )
    _add_selection(verify)
    _add_device(verify)
    verify.set_defaults(run=run_verify)

    tune = subparsers.add_parser(
        "tune", help="measure kernel configurations for given shapes, and use the best from then on"
    )
    _add_selection(tune, routings=False)
    _add_device(tune)
    tune.add_argument(
        "--product", action="append", choices=NAMES, help="one of a layer's six products; all"
    )
    tune.add_argument(
        "--out", type=Path, metavar="FILE",
        help="table to write; $SONICMOE_TUNED or ~/.cache/sonicmoe/tuned-<device>.json",
    )  # fmt: skip
    tune.add_argument("--results", type=Path, metavar="FOLDER", help="keep every figure there too")
    tune.add_argument("--commit", help="of the source, where it is no git repository")
    tune.set_defaults(run=run_tune)

    price = subparsers.add_parser("cost", help="FLOPs, bytes, traffic and least time of a shape")
    _add_selection(price, routings=False)
    price.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    price.add_argument("--gpu", default="h200", help=", ".join(cost.GPUS))
    price.add_argument("--tile-height", type=int, metavar="M", help="128, in float32 32")
    price.set_defaults(run=run_cost)


def _add_selection(parser: argparse.ArgumentParser, routings: bool = True) -> None:
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


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--gate-up", choices=("interleaved", "concatenated"), default="interleaved")


def selected_cases(args: argparse.Namespace) -> list[Case]:
    """Suites, named cases, shapes, in this order; the grid where nothing was named."""
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


def _cases_of_extras(args: argparse.Namespace) -> list[Case]:
    """What `_extra_figures` measures."""
    selected = selected_cases(args) if args.cold or args.ways else []
    return ([HOST] if args.host else []) + selected


def _only_extras(args: argparse.Namespace) -> bool:
    """Whether times are not wanted, or `--host` has nothing beside it that would need a case."""
    if args.no_times:
        _check_apart_from_times(args, "--no-times", "energy")
        if not _cases_of_extras(args):
            raise bad_argument(
                "--no-times",
                "--host, --cold or --ways beside it",
                "none",
                "Leave it out for times.",
            )
        if args.routing != ["uniform"]:
            raise bad_argument(
                "--no-times", "uniform routing", " ".join(args.routing), "Leave --routing out."
            )
        return True
    needy = ("suite", "case", "shape", "cold", "ways", "energy", *_ABOUT_TIMES)
    plain = args.routing == ["uniform"] and not any(getattr(args, name) for name in needy)
    return args.host and plain


def run_bench(args: argparse.Namespace) -> int:
    from . import peers, readme, report, results
    from .energy import Board
    from .run import bench_case, energy_case, verify_case

    folder = args.results or results.RESULTS
    if args.list:
        rows = [
            [c.name, str(c.problem), c.activation.value, c.router, c.note] for c in CASES.values()
        ]
        print(report.table(("case", "T,H,I,E,K", "activation", "router", "note"), rows))
        return 0
    if args.report:
        readme.update_readme(args.report, results.read(folder), folder)
        return 0

    named = peers.available() if args.peers is None else args.peers
    known = (peers.DENSE, *peers.PEERS)
    for name in named:
        if name not in known:
            raise bad_argument("--peers", f"names of {', '.join(known)}", name, "Leave it out.")
    options = _options(args, check=not args.no_verify, kernels=args.kernels, peers=tuple(named))
    if args.energy:
        _check_apart_from_times(args, "--energy")
        Board(args.device)  # says what is missing before anything takes time
    measure = energy_case if args.energy else bench_case
    command = shlex.join(["sonicmoe", *args.argv])
    origin = results.provenance(args.device, command, args.commit)
    records, failures = [], []
    alone = _only_extras(args)
    if alone and options.check:
        for case in _cases_of_extras(args):
            failures += verify_case(case, "uniform", options).failures
    for case in [] if alone else selected_cases(args):
        for routing in args.routing:
            outcome = measure(case, routing, options)
            records += outcome.records
            failures += outcome.failures
            if options.check:
                _keep([origin | record for record in outcome.records], folder, args.label)
    skew = report.skew_table(records)
    if skew:
        print(f"\n{skew}")
    extras = [] if failures else _extra_figures(args, options)
    if options.check:
        _keep([origin | record for record in extras], folder, args.label)
    return _finish(failures)


_ABOUT_TIMES = ("kernels", "peers", "sonicmoe_path")


def _check_apart_from_times(args: argparse.Namespace, flag: str, *more: str) -> None:
    """What is about times would be passed over."""
    for name in (*_ABOUT_TIMES, *more):
        if getattr(args, name):
            raise bad_argument(
                flag, "no flag that is about times beside it",
                f"--{name.replace('_', '-')}", "Measure the two one after the other.",
            )  # fmt: skip


def _extra_figures(args: argparse.Namespace, options) -> list[dict]:
    from . import report
    from .cold import measure_cold
    from .host import measure_host
    from .run import about_case
    from .ways import measure_ways

    plain = replace(options, concatenated=False)  # neither knows the other layout
    records = []
    if args.host:
        figures = measure_host(args.device, options.dtype)
        print(f"\nthe host alone\n{report.figure_table(figures)}")
        records.append(about_case(HOST, plain) | {"subject": "host"} | figures)
    if args.cold:
        for case in selected_cases(args):
            dtype = str(options.dtype).removeprefix("torch.")
            figures = measure_cold(case, args.device, dtype)
            print(f"\ncold start, {case.name}\n{report.figure_table(figures)}")
            records.append(about_case(case, plain) | {"subject": "cold"} | figures)
    if args.ways:
        for case in selected_cases(args):
            figures = measure_ways(case, args.device, options.dtype)
            print(f"\nways to run it, {case.name}\n{report.figure_table(figures)}")
            records.append(about_case(case, plain) | {"subject": "ways"} | figures)
    return records


def run_verify(args: argparse.Namespace) -> int:
    from .run import verify_case

    options = _options(args)
    failures = []
    for case in selected_cases(args):
        for routing in args.routing:
            failures += verify_case(case, routing, options).failures
    return _finish(failures)


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
        selected_cases(args), _options(args), args.product or NAMES, args.out
    )
    if args.results:
        command = shlex.join(["sonicmoe", *args.argv])
        origin = results.provenance(args.device, command, args.commit)
        _keep([origin | record for record in outcome.records], args.results, "tune")
    return _finish(outcome.failures)


def run_cost(args: argparse.Namespace) -> int:
    from ..tuning.config import tile_rows
    from .price import price

    gpu = cost.find_gpu(args.gpu)
    itemsize = 4 if args.dtype == "float32" else 2
    height = args.tile_height or tile_rows(itemsize)
    for case in selected_cases(args):
        print(price(case, gpu, itemsize, height))
    return 0


def _options(args: argparse.Namespace, **more):
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
        concatenated=args.gate_up == "concatenated",
        sonicmoe_path=getattr(args, "sonicmoe_path", None),
        **more,
    )


def _keep(records: list[dict], folder: Path, label: str) -> None:
    from . import results

    path = results.write(records, folder, label)
    if path is not None:
        print(f"kept {len(records)} records in {path}", file=sys.stderr)


def _finish(failures: list[str]) -> int:
    for failure in failures:
        print(f"\nFAILED {failure}\nNo figure is given for it.", file=sys.stderr)
    return 1 if failures else 0
