"""Times one MoE layer, router included, and checks it against fp64 first.

python benchmarks/moe-cute.py --thiek 32768,4096,1024,128,8 --activation swiglu
"""

import argparse
import sys

import torch
from research.bench import Options, bench_case

from sonicmoe.enums import ActivationType
from sonicmoe.tools.cases import Case


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiek", default="32768,4096,1024,128,8", metavar="T,H,I,E,K")
    parser.add_argument(
        "--activation", default="swiglu", choices=[a.value for a in ActivationType], type=str.lower
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        type=lambda text: text.lower().removeprefix("torch."),
        help="bfloat16 on a GPU, float32 elsewhere",
    )
    parser.add_argument("--add_bias", action="store_true")
    parser.add_argument("--skip_test", action="store_true", help="time without checking first")
    parser.add_argument(
        "--topk_over_softmax", action="store_true", help="softmax before the choice"
    )
    parser.add_argument(
        "--norm_topk_probs", action="store_true", help="with --topk_over_softmax: scores sum to one"
    )
    parser.add_argument(
        "--concat_layout", action="store_true", help="all gates first, then all ups"
    )
    args = parser.parse_args()
    if args.norm_topk_probs and not args.topk_over_softmax:
        parser.error("--norm_topk_probs: expected --topk_over_softmax beside it; add it")
    return args


def main() -> int:
    args = parse_args()
    router = "topk_over_softmax" if args.topk_over_softmax else "softmax_over_topk"
    router += "_normalized" if args.norm_topk_probs else ""
    try:
        case = Case.of_shape(args.thiek, ActivationType(args.activation), args.add_bias, router)
    except ValueError as error:
        sys.exit(f"--thiek: {error}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    options = Options(
        device=device,
        dtype=getattr(torch, dtype),
        gate_up="concatenated" if args.concat_layout else "interleaved",
        check=not args.skip_test,
    )
    failures = bench_case(case, "uniform", options).failures
    for failure in failures:
        print(f"FAILED {failure}\nIt is not timed.", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
