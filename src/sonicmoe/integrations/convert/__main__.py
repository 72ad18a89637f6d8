"""python -m sonicmoe.integrations.convert from_hf FOLDER NEW_FOLDER"""

import argparse
import sys

from ...validation import LAYOUTS
from .checkpoints import checkpoint_from_hf, checkpoint_to_hf


def main(argv: list[str] | None = None) -> None:
    """Convert the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m sonicmoe.integrations.convert",
        description="Convert a checkpoint of transformers to the names of sonicmoe.MoE, or back.",
    )
    ways = parser.add_subparsers(dest="way", required=True, metavar="from_hf | to_hf")
    for way in ("from_hf", "to_hf"):
        words = "to the names of MoE" if way == "from_hf" else "back to those of transformers"
        command = ways.add_parser(way, help=words, description=f"Convert a checkpoint {words}.")
        command.add_argument("source", help="folder with safetensors files")
        command.add_argument("target", help="folder to write, which must not exist")
        if way == "from_hf":
            command.add_argument("--gate-up", choices=LAYOUTS, default="interleaved")
    args = parser.parse_args(argv)
    try:
        if args.way == "from_hf":
            checkpoint_from_hf(args.source, args.target, gate_up=args.gate_up, progress=_say)
        else:
            checkpoint_to_hf(args.source, args.target, progress=_say)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(args.target)


def _say(done: int, layers: int, name: str) -> None:
    print(f"{done}/{layers} {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
