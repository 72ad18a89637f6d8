"""Token rounding beside plain top-K over four sweeps of the number of experts, router in."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from sonicmoe.tools.candidates import Candidate, leaves_of
from sonicmoe.tools.inputs import make_inputs
from sonicmoe.tools.tables import table

from .kernels import busy_ms
from .measure import time_interleaved, timers
from .results import Record
from .rounding import Options, failures_of, make_router, parse_shape, routing_alone, with_router

# The more experts, the fewer rows for each, and the larger the share of their last tiles.
SWEEPS = {
    "16384,1536,256,E,8": (64, 128, 256, 512),
    "16384,1536,1024,E,2": (16, 32, 64, 128),
    "16384,4096,512,E,8": (64, 128, 256, 512),
    "16384,4096,1024,E,4": (32, 64, 128, 256),
}
# 64 rows move half as many tokens, and leave some last tiles half full.
CONTENDERS = (("top_k", 128), ("nr", 128), ("nr", 64))
ROUNDS = 3


def sweep_shapes(tokens: int | None = None) -> list[str]:
    shapes = [s.replace("E", str(e)) for s, experts in SWEEPS.items() for e in experts]
    return shapes if tokens is None else [f"{tokens},{s.split(',', 1)[1]}" for s in shapes]


def run_sweep(shapes: list[str], options: Options) -> Iterator[list[Record] | str]:
    """For each shape its records, or what is wrong with it."""
    for shape in shapes:
        case, _ = parse_shape(f"{shape},{options.tile}")
        inputs = make_inputs(case, "uniform", options.device, options.dtype)
        with torch.no_grad():
            logits = torch.nn.functional.linear(inputs.x, inputs.router_w)
        candidates: dict[tuple[str, int], Candidate] = {}
        records, wrong = [], []
        for routing, tile in CONTENDERS:
            one = replace(options, routing=routing, tile=tile)
            router = make_router(case, one)
            with torch.no_grad():
                fixed = router(logits)
            if options.check:
                wrong += failures_of(inputs, router, fixed, one)
            candidates[routing, tile] = Candidate(
                routing, True, with_router(inputs, router, one),
                leaves_of(inputs, router=True), inputs.dout,
            )  # fmt: skip
            records.append({
                "kind": "rounding", "shape": shape, "routing": routing, "tile": tile,
                "rows": int((fixed.ids >= 0).sum()),
                "routing_busy_ms": busy_ms(routing_alone(router, logits, one), options.device),
            })  # fmt: skip
        if wrong:
            yield f"{shape}: " + "; ".join(wrong)
            continue
        contenders = {
            key: timers(s.forward, s.forward_backward, options.device, options.rep_ms)
            for key, s in candidates.items()
        }
        timed = time_interleaved(case.problem, contenders, ROUNDS)
        for record, key in zip(records, candidates, strict=True):
            record |= timed[key]
        yield records


def sweep_table(records: list[Record]) -> str:
    """A line for each shape: time of top-K, and the speedups of token rounding over it."""
    rows = []
    for shape in dict.fromkeys(r["shape"] for r in records):
        of = {(r["routing"], r["tile"]): r for r in records if r["shape"] == shape}
        plain, *rounded = (of[key] for key in CONTENDERS)
        gains = [f"{plain['fwd_bwd_ms'] / r['fwd_bwd_ms']:.2f}×" for r in rounded]
        rows.append([shape, f"{plain['fwd_bwd_ms']:.2f}", *gains])
    return table(["T,H,I,E,K", "top-K, ms", *(f"NR-f {tile}" for _, tile in CONTENDERS[1:])], rows)
