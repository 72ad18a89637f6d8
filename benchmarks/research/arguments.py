"""Arguments that scripts share, and the loop over cases and routings."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sonicmoe.errors import bad_argument
from sonicmoe.tools.cases import Case
from sonicmoe.tools.commands import options_of, selected_cases
from sonicmoe.validation import check_writable

from . import results, run_tables
from .bench import Options, Outcome


def add_results(parser: argparse.ArgumentParser, default: Path = results.RESULTS) -> None:
    parser.add_argument("--kernels", action="store_true", help="also each operator and each kernel")
    parser.add_argument("--no-verify", action="store_true", help="skip the checks; nothing is kept")
    folder = f"keep the records there; default: {default}"
    parser.add_argument("--results", type=Path, default=default, metavar="FOLDER", help=folder)
    parser.add_argument("--commit", help="of the source, where there is no git repository")
    parser.add_argument("--label", default="layer", help="end of the name of the results file")


def options(args: argparse.Namespace) -> Options:
    """Device, dtype and layout; checks all arguments before anything is measured."""
    of = options_of(args)
    if not args.no_verify:
        check_writable("--results", args.results)
    return Options(of.device, of.dtype, of.gate_up, not args.no_verify, args.kernels)


def measure_cases(
    args: argparse.Namespace,
    options: Options,
    origin: dict,
    measure: Callable[[Case, str, Options], Outcome],
) -> list[str]:
    """Measure every selected case under every routing; keep the records, return the failures."""
    records, failures = [], []
    for case in selected_cases(args):
        for routing in args.routing:
            outcome = measure(case, routing, options)
            records += outcome.records
            failures += outcome.failures
            if options.check:
                keep([origin | record for record in outcome.records], args)
    skew = run_tables.skew_table(records)
    if skew:
        print(f"\n{skew}")
    return failures


def check_apart_from_times(args: argparse.Namespace, flag: str, flags: Sequence[str]) -> None:
    """Raise if `flag` is combined with flags that only concern times."""
    for name in flags:
        if getattr(args, name):
            other = f"--{name.replace('_', '-')}"
            remedy = "Measure the two one after the other."
            raise bad_argument(flag, "no timing flag with it", other, remedy)


def keep(records: list[dict], args: argparse.Namespace) -> None:
    """Append the records to a file below --results."""
    path = results.write(records, args.results, args.label)
    if path is not None:
        print(f"kept {len(records)} records in {path}", file=sys.stderr)


def finish(failures: list[str]) -> int:
    for failure in failures:
        print(f"\nFAILED {failure}\nIt is not timed.", file=sys.stderr)
    return 1 if failures else 0
