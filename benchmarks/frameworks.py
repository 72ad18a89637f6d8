"""Our experts inside transformers and PEFT, beside what runs there without them; checked first.

python benchmarks/frameworks.py
python benchmarks/frameworks.py --device cpu --tiny --part layer lora
"""

import argparse
import shlex
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from research import frameworks, results


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=frameworks.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=frameworks.PARTS, default=[*frameworks.PARTS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="bfloat16 on a GPU, float32 elsewhere",
    )
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU likes")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="of training")
    parser.add_argument("--results", type=Path, default=results.RESULTS, metavar="FOLDER")
    parser.add_argument("--commit", help="of the source, where it is no git repository")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device: expected a device that is here, got {args.device}; use cpu --tiny")
    return args


def main() -> int:
    args = parse_args()
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    options = frameworks.Options(args.device, getattr(torch, dtype), args.tiny, args.steps)
    origin = results.provenance(
        args.device, shlex.join(["python", "benchmarks/frameworks.py", *sys.argv[1:]]), args.commit
    )
    origin |= {name: version(name) for name in ("transformers", "peft") if find_spec(name)}
    origin["dtype"] = dtype
    failed = False
    for part in args.part:
        outcome = frameworks.PARTS[part](options)
        path = results.write([origin | r for r in outcome.records], args.results, "frameworks")
        if path is not None:
            print(f"kept {len(outcome.records)} records in {path}", file=sys.stderr)
        for failure in outcome.failures:
            print(f"FAILED {failure}\nIt is not timed.", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
