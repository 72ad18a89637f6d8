"""A LoRA step of one layer on packed experts, ours and other packages' interleaved, as JSON lines.

    python benchmarks/packed_peers.py --peers FOLDER

A step is forward and backward with gradients for X, the scores and both adapters, of rank 16. First
each candidate's second step is compared with fp64 on the decoded weights, since some add an adapter
once more in every call; one with a gradient that is wrong is listed with its errors and not timed.
benchmarks/README.md says how to fill FOLDER; without it only what needs no other package runs.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from packed_random import random_packed
from research import packed_candidates as plain
from research import packed_peers as peers
from research import records
from research.packed_layer import LAYERS, Layer, by_experts, errors, make_inputs, step
from research.timing import interleaved

STEPS, WARMUP = 3, 1  # of a round, and before the first round
LIMIT = 0.03  # of the norm; bf16 errs by 0.005. Decoded to e4m3 it is 0.1.
LIMIT_FP8 = 0.1
SECONDS = 60  # for a candidate's first step, which compiles and tunes
Makers = dict[str, Callable[..., plain.Forward]]


def candidates(format: str, layer: Layer, folder: Path | None) -> Makers:
    """By label, functions of inputs and weights; they raise where a package is absent."""
    found: Makers = {
        "ours to bf16": plain.ours,
        "ours to e4m3": lambda i, w: plain.ours(i, tuple(p.for_fp8() for p in w), "fp8"),
    }
    decoder, whose = plain.by_transformers, "transformers"
    if format == "nf4":
        decoder, whose = peers.by_bitsandbytes, "bitsandbytes"
    of_decoder: Makers = {
        f"decoded by {whose}, ours": plain.decoded_for_ours,
        f"decoded by {whose}, grouped_mm": plain.decoded_for_grouped_mm,
        f"PEFT's W + B·A, decoded by {whose}": plain.peft_arithmetic,
        "PEFT on bf16, decoded before": plain.peft_on_dense,
    }
    found |= {label: partial(make, decode=decoder) for label, make in of_decoder.items()}
    if folder is None:
        return found
    if format == "nf4":
        found["axolotl, NF4 decoded"] = peers.axolotl_nf4
        found["unsloth's NF4 GEMM"] = partial(peers.unsloth_nf4, folder)
        if not layer.like_gpt_oss:  # there its blocks run along the other side of a weight
            found["PEFT on bitsandbytes' experts"] = peers.peft_on_bitsandbytes
        return found

    def by_unsloth(make, inputs, weights):
        return make(inputs, weights, peers.unsloth_decoder(folder))

    found["decoded by unsloth, grouped_mm"] = partial(by_unsloth, plain.decoded_for_grouped_mm)
    found["axolotl, decoded by unsloth"] = partial(by_unsloth, peers.axolotl_decoded)
    found["axolotl, MXFP4 in its GEMM"] = peers.axolotl_mxfp4
    return found


class Bench:
    """The candidates of one layer, format and number of tokens."""

    def __init__(
        self,
        layer: Layer,
        format: str,
        tokens: int,
        folder: Path | None,
        device: torch.device,
        failed: dict[str, str],
    ) -> None:
        """`failed`: the candidates that are left out, and why; those that fail join them."""
        self.inputs = make_inputs(layer, tokens, device)
        self.weights = tuple(random_packed(format, shape, device) for shape in layer.shapes)
        self.makers = candidates(format, layer, folder)
        self.found: dict[str, plain.Forward] = {}
        self.failed = failed

    def make(self) -> None:
        for label, maker in self.makers.items():
            if label in self.failed:
                continue
            begin = time.perf_counter()
            try:
                with warnings.catch_warnings(), time_limit(SECONDS):
                    warnings.simplefilter("ignore")  # PEFT's, of all its modules
                    forward = maker(self.inputs, self.weights)
                    step(self.inputs, forward)
                self.found[label] = forward
            except Exception as error:
                self.failed[label] = f"{type(error).__name__}: {error}"[:300]
                print(f"left out: {label}: {self.failed[label]}", file=sys.stderr, flush=True)
            print(f"{label}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)

    def check(self) -> dict[str, dict[str, float]]:
        """The errors of every candidate; those that are wrong are not timed."""
        exact = self.inputs.to(torch.float64)
        dense = [w.dequantize() for w in self.weights]
        wanted = step(exact, lambda: by_experts(exact, *dense))
        found = {}
        for label in list(self.found):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found[label] = errors(step(self.inputs, self.found[label]), wanted)
            except Exception as error:
                self.failed[label] = f"{type(error).__name__}: {error}"[:300]
                del self.found[label]
                continue
            limit = LIMIT_FP8 if label == "ours to e4m3" else LIMIT
            wrong = [name for name, e in found[label].items() if not e < limit]
            if wrong:
                self.failed[label] = f"wrong: {', '.join(wrong)}"
                del self.found[label]
        return found

    def measure(self, rounds: int) -> dict[str, Any]:
        steps = {label: partial(step, self.inputs, f) for label, f in self.found.items()}
        peak = {}
        for label, run in steps.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for _ in range(WARMUP):
                run()
            peak[label] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
        timers = {label: partial(_milliseconds, run) for label, run in steps.items()}
        medians = interleaved(timers, rounds)
        base = medians.get("ours to bf16", float("nan"))
        of_ours = {label: round(ms / base, 2) for label, ms in medians.items()}
        return {"ms": medians, "÷ ours to bf16": of_ours, "peak GiB": peak}


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError in the code within, at the first Python statement after that time."""

    def stop(*_) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _milliseconds(run: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(STEPS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / STEPS


def compile_in_parallel(layers: Sequence[str], formats: Sequence[str], rest: list[str]) -> None:
    """A process for each layer and format, which leaves its kernels in the caches on disk."""
    command = [sys.executable, __file__, "--compile-only", *rest]
    running = [
        subprocess.Popen(
            [*command, "--layers", layer, "--formats", format],
            stdout=subprocess.DEVNULL,
        )
        for layer in layers
        for format in formats
    ]  # fmt: skip
    for process in running:
        process.wait()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="other packages, unpacked")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--formats", nargs="+", default=["mxfp4", "nf4"], choices=["mxfp4", "nf4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--compile-only", action="store_true", help="run each step once, and end")
    records.add_options(parser)
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    device = torch.device(args.device)
    if args.peers is not None:
        sys.path.append(str(args.peers))
    tokens = [str(t) for t in args.tokens]
    # Else each process starts 16 workers for three small kernels.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if not args.compile_only:
        rest = ["--tokens", *tokens, *(["--peers", str(args.peers)] if args.peers else [])]
        compile_in_parallel(args.layers, args.formats, rest)
        command = records.command("packed_peers.py", given, ["--peers"])
        made = records.Records("packed peers", device, command, args)
    for name in args.layers:
        for format in args.formats:
            failed: dict[str, str] = {}
            for number, count in enumerate(args.tokens):
                bench = Bench(LAYERS[name], format, count, args.peers, device, failed)
                bench.make()
                if not args.compile_only:
                    # fp64 on the first number of tokens alone, which takes long enough.
                    wrong = bench.check() if number == 0 else {}
                    record = {"layer": name, "format": format, "tokens": count}
                    record |= bench.measure(args.rounds)
                    record |= {"errors": wrong, "not timed": bench.failed}
                    made.keep(record)
                del bench
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
