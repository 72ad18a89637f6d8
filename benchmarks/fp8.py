"""Times FP8 layers beside bf16 and beside bare GEMMs, with settled clocks and energy per step.

python benchmarks/fp8.py --peers-path FOLDER
python benchmarks/fp8.py --case olmoe --candidates sonicmoe sonicmoe_fp8 dense_fp8
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from research import fp8, results
from research.arguments import finish, keep
from research.bench import Options
from research.fp8_candidates import CANDIDATES
from research.timing import is_cuda

from sonicmoe.enums import ActivationType
from sonicmoe.errors import bad_argument
from sonicmoe.tools.cases import Case, find_case
from sonicmoe.validation import check_writable

CASES = ("7b-fine", "olmoe", "30b-fine", "120b", "qwen3-next")
COMPILE_S = 240


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = f"a named case; default: {', '.join(CASES)}"
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help=named)
    parser.add_argument("--shape", action="append", default=[], metavar="T,H,I,E,K")
    words = f"of {', '.join(CANDIDATES)}; default: all"
    parser.add_argument("--candidates", nargs="+", metavar="NAME", help=words)
    parser.add_argument("--peers-path", metavar="FOLDER", help="torchao and DeepGEMM, unpacked")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--rounds", type=int, default=fp8.ROUNDS, help="turns of each candidate")
    words = "of a turn to settle, then to measure"
    parser.add_argument("--seconds", type=float, default=fp8.SECONDS, help=words)
    words = "call each layer once and end"
    parser.add_argument("--compile-only", action="store_true", help=words)
    folder = results.RESULTS
    parser.add_argument(
        "--results", type=Path, default=folder, metavar="FOLDER", help=f"default: {folder}"
    )
    parser.add_argument("--commit", help="of the source, where there is no git repository")
    parser.set_defaults(label="fp8")
    return parser.parse_args(argv)


def selected_cases(args: argparse.Namespace) -> list[Case]:
    cases = [find_case(name) for name in args.case]
    cases += [Case.of_shape(text) for text in args.shape]
    for case in cases:
        plain = case.activation is ActivationType.SWIGLU and not case.bias
        if not plain or case.router != "softmax_over_topk":
            expected = "SwiGLU, no biases, softmax over top-K"
            raise bad_argument("--case", expected, case.name, "Give its sizes with --shape.")
    return cases or [find_case(name) for name in CASES]


def compile_in_parallel(cases: Sequence[Case], names: Sequence[str], args) -> None:
    """Fill the compilers' caches, one process a case: DeepGEMM and Triton compile for minutes."""
    command = [sys.executable, __file__, "--compile-only", "--candidates", *names]
    command += ["--device", args.device]
    if args.peers_path:
        command += ["--peers-path", args.peers_path]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    started = [
        subprocess.Popen([*command, "--shape", str(case.problem)], env=environment)
        for case in cases
    ]
    begin = time.monotonic()
    for process in started:
        try:
            process.wait(max(0.0, begin + COMPILE_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"compiled for {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    cases, names = selected_cases(args), args.candidates or list(CANDIDATES)
    for name in names:
        if name not in CANDIDATES:
            known = f"names of {', '.join(CANDIDATES)}"
            raise bad_argument("--candidates", known, name, "Leave it out.")
    if args.rounds < 1:
        raise bad_argument("--rounds", "at least 1", args.rounds, "Leave it out.")
    if args.peers_path:
        if not Path(args.peers_path).is_dir():
            remedy = "benchmarks/README.md says how to make it."
            raise bad_argument("--peers-path", "a folder", args.peers_path, remedy)
        sys.path.insert(0, args.peers_path)
    options = Options(device=args.device, dtype=torch.bfloat16)
    if args.compile_only:
        for case in cases:
            fp8.call_once(case, names, options)
        return 0
    check_writable("--results", args.results)
    command = shlex.join(["python", "benchmarks/fp8.py", *argv])
    origin = results.provenance(args.device, command, args.commit)
    if is_cuda(args.device) and len(cases) > 1:
        compile_in_parallel(cases, names, args)
    failures = []
    for case in cases:
        found = fp8.bench_case(case, names, options, args.rounds, args.seconds)
        keep([origin | record for record in found], args)
        print(fp8.fp8_table({case.name: found}), flush=True)
        failures += [
            f"{case.name}: {r['candidate']}: {r['failed']}" for r in found if "failed" in r
        ]
    return finish(failures)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"fp8.py: {error}", file=sys.stderr)
        sys.exit(2)
