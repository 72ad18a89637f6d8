"""The command line: `sonicmoe <command>`, or `python -m sonicmoe <command>`."""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from .extras import documentation  # first: it raises where files of ours are missing

# isort: split
from . import __version__
from .extras import MissingExtra
from .tools.commands import register as register_tools

# Of other distributions: functions that take the subparsers and add commands.
PLUGINS = "sonicmoe.commands"
TRAINER = ("train", "compare", "generate", "export")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    1: a check failed; 2: bad arguments, with one line on stderr; 130: stopped by Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(argv)
    args.argv = argv
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        return _end(args, "stopped", 130)
    except OSError as error:
        known = error.filename is not None and error.strerror
        return _end(args, f"{error.filename}: {error.strerror}" if known else str(error), 2)
    except (ValueError, MissingExtra, FloatingPointError) as error:
        return _end(args, str(error), 2)


def _end(args: argparse.Namespace, message: str, status: int) -> int:
    print(f"sonicmoe {args.command}: {message}", file=sys.stderr)
    return status


def parser() -> argparse.ArgumentParser:
    """The parser of every command; each sets `run` to a function of the parsed arguments."""
    about = "Mixture-of-Experts layers for GPUs: measure them, and train language models with them."
    whole = argparse.ArgumentParser(prog="sonicmoe", description=about)
    whole.add_argument("--version", action="version", version=f"sonicmoe {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")
    register_tools(commands)
    for plugin in importlib.metadata.entry_points(group=PLUGINS):
        plugin.load()(commands)
    if "train" not in commands.choices:
        for name in TRAINER:
            about = "needs sonicmoe-trainer"
            absent = commands.add_parser(
                name, help=about, description=f"It {about}.", prefix_chars="\0", add_help=False
            )
            absent.add_argument("ignored", nargs="*", help="any arguments")
            absent.set_defaults(run=_absent)
    about = "what is installed here, and what would run"
    doctor = commands.add_parser("doctor", help=about, description=f"Print {about}.")
    flag = "what a report of a bug needs, to paste into it; also runs a small layer"
    doctor.add_argument("--report", action="store_true", help=flag)
    doctor.set_defaults(run=_doctor)
    about = "where the documentation is"
    docs = commands.add_parser("docs", help=about, description=f"Print {about}.")
    docs.set_defaults(run=_docs)
    return whole


def _absent(args: argparse.Namespace) -> int:
    where = "pip install sonicmoe-trainer, or pip install ./trainer in a clone of SonicMoE"
    raise MissingExtra(f"the trainer is a package of its own. Install it: {where}")


def _doctor(args: argparse.Namespace) -> int:
    from .tools.doctor import bug_report, report

    print(bug_report() if args.report else report())
    return 0


def _docs(args: argparse.Namespace) -> int:
    print(documentation())
    return 0
