"""Times one MoE layer under token rounding, with its router and without, and checks it first.

python benchmarks/moe-token-rounding.py --thiekq 16384,4096,1024,256,4,128 --routing nr
"""

import argparse
import sys

import torch

from sonicmoe.bench.rounding import ROUTINGS, Options, bench_rounding, parse_shape


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
    return parser.parse_args()


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
        concatenated=args.concat_layout,
        check=not args.skip_test,
        rep_ms=args.rep,
    )
    failures = bench_rounding(case, options)
    for failure in failures:
        print(f"FAILED {failure}\nNo figure is given for it.", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
