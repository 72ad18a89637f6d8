"""What a script measures: printed as JSON lines and appended to the kept results."""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sonicmoe.validation import check_writable

from .results import RESULTS, provenance, write

PRIVATE = ("--results", "--commit")  # do not change what is measured
OF_THIS_MACHINE = {"--peers": "FOLDER", "--tokens": "FILE"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--commit", help="of the source, where there is no git repository")


def command(script: str, given: Sequence[str], paths: Sequence[str] = ()) -> str:
    """The command without what is private; the values of the options `paths` are replaced."""
    kept, words = [], iter(given)
    for word in words:
        name, sign, _ = word.partition("=")
        if name not in PRIVATE and name not in paths:
            kept.append(word)
            continue
        if not sign:
            next(words, None)
        if name in paths:
            kept += [name, OF_THIS_MACHINE[name]]
    return shlex.join(["python", f"benchmarks/{script}", *kept])


class Records:
    """Those of one run; `kind` names them and their file."""

    def __init__(
        self, kind: str, device: torch.device | str, command: str, args: argparse.Namespace
    ) -> None:
        check_writable("--results", args.results)
        self.folder = args.results
        self.about = provenance(device, command, args.commit) | {"kind": kind}

    def keep(self, found: dict[str, Any], unshown: Sequence[str] = ()) -> None:
        """Print what was found, and append it at once: a later measurement may fail."""
        record = self.about | found
        shown = {key: value for key, value in record.items() if key not in unshown}
        print(json.dumps(shown, ensure_ascii=False), flush=True)
        write([record], self.folder, record["kind"])
