"""The command line: `sonicmoe <command>`, or `python -m sonicmoe <command>`."""

import argparse
import sys
from collections.abc import Sequence

from .bench.cli import register as register_bench
from .train.cli import register as register_train


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 1 where a check failed, 2 for bad arguments."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(argv)
    args.argv = argv
    try:
        return args.run(args) or 0
    except ValueError as error:
        print(f"sonicmoe {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sonicmoe", description="Mixture-of-Experts layers for GPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    register_bench(commands)
    register_train(commands)
    doctor = commands.add_parser("doctor", help="what is installed here, and what would run")
    doctor.set_defaults(run=_doctor)
    return parser


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import report

    print(report())
    return 0
