"""Times one MoE layer under token rounding, with its router and without, and checks it first.

python benchmarks/moe-token-rounding.py --thiekq 16384,4096,1024,256,4,128 --routing nr
"""

import argparse
import sys
from pathlib import Path

import torch
from research import results
from research.rounding import ROUTINGS, Options, bench_rounding, parse_shape
from research.rounding_sweep import run_sweep, sweep_shapes, sweep_table


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiekq", default="16384,4096,1024,256,4,128", metavar="T,H,I,E,K,tileM")
    parser.add_argument(
        "--routing", default="nr", choices=tuple(ROUTINGS), help="top_k rounds nothing"
    )
    parser.add_argument(
        "--rep", type=int, default=200, metavar="MS", help="milliseconds of measuring a figure"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        type=lambda text: text.lower().removeprefix("torch."),
        help="bfloat16 on a GPU, float32 elsewhere",
    )
    parser.add_argument("--skip_test", action="store_true", help="time without checking first")
    parser.add_argument("--add_bias", action="store_true")
    parser.add_argument(
        "--concat_layout", action="store_true", help="all gates first, then all ups"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="four sweeps of E, top-K and nr; --thiekq is not used"
    )
    parser.add_argument("--tokens", type=int, help="of a sweep; default: 16384")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="keep a sweep's figures")
    parser.add_argument("--commit", help="named in kept figures")
    return parser.parse_args()


def sweep(args: argparse.Namespace, options: Options) -> list[str]:
    """Prints each shape when it is done, then the whole table."""
    shapes, kept, failures = sweep_shapes(args.tokens), [], []
    origin = results.provenance(options.device, " ".join(sys.argv), args.commit)
    for i, found in enumerate(run_sweep(shapes, options), 1):
        if isinstance(found, str):
            failures.append(found)
            continue
        records = [origin | record for record in found]
        kept += records
        print(f"{i}/{len(shapes)}", sweep_table(records).splitlines()[-1], flush=True)
        if args.results:
            results.write(records, args.results, "rounding")
    if kept:
        print(sweep_table(kept))
    return failures


def main() -> int:
    args = parse_args()
    try:
        case, tile = parse_shape(args.thiekq, args.add_bias)
    except ValueError as error:
        sys.exit(f"--thiekq: {error}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    options = Options(
        tile=tile,
        routing=args.routing,
        device=device,
        dtype=getattr(torch, dtype),
        gate_up="concatenated" if args.concat_layout else "interleaved",
        check=not args.skip_test,
        rep_ms=args.rep,
    )
    failures = sweep(args, options) if args.sweep else bench_rounding(case, options)
    for failure in failures:
        print(f"FAILED {failure}\nIt is not timed.", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
