"""A training step of the layer, eager, as CUDA graphs and compiled, as JSON lines.

    python benchmarks/graphs.py

Every mode first gives the bits of the eager layer, in outputs and all gradients; compiled ones are
also accepted within 1% of them, and `same_bits` says so. Two more are eager too: `one_core`, whose
threads share one core, and `stack`, a layer of a stack of eight. Wall time is the median of
interleaved rounds of several steps. GPU-busy time is the sum of the kernels' durations by PyTorch's
profiler, which also counts launches. Each layer and precision has a process of its own, since every
launch may take longer once the profiler has run. `dense` are six cuBLAS GEMMs with the FLOPs of the
layer in bf16. Takes about three minutes on an H200.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from research import records
from research.dense import dense
from research.timing import interleaved

from sonicmoe import MoE, graphed
from sonicmoe.shapes import Problem

LAYERS = ("2048,2048,1024,64,8", "512,2048,768,128,8", "24576,1536,256,128,8")
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_kept": {"precision": "fp8", "cache_fp8_weights": True},
}
ROUNDS, STEPS, WARMUP, TOLERANCE = 9, 8, 6, 0.01
STACK = 8  # layers
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")

Step = Callable[[], dict[str, torch.Tensor]]


def training_steps(p: Problem, precision: str) -> dict[str, Step]:
    """A step in each mode of one layer: both passes; gradients are set to None."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        moe = MoE(p.E, p.K, p.H, p.I, std=0.02, dtype=torch.bfloat16, **PRECISIONS[precision])
        x = torch.randn(p.T, p.H, dtype=torch.bfloat16, requires_grad=True)
        upstream = (torch.randn_like(x), torch.ones((), dtype=torch.float32))
    moe(x)  # quantizes, so that nothing later does
    torch._dynamo.reset()
    layers = {
        "eager": moe,
        "calling_thread": moe,
        "graphed": graphed(moe, x, other="error"),
        "graphed_no_copy": graphed(moe, x, other="error", copy_outputs=False),
        "compiled": torch.compile(moe, fullgraph=True),
        "reduce_overhead": torch.compile(moe, fullgraph=True, mode="reduce-overhead"),
    }
    leaves = {"x": x, **dict(moe.named_parameters())}

    def step(layer: torch.nn.Module, mode: str, keep: bool = True) -> dict[str, torch.Tensor]:
        if mode == "reduce_overhead":
            torch.compiler.cudagraph_mark_step_begin()
        out, aux_loss = layer(x)
        with torch.autograd.set_multithreading_enabled(mode != "calling_thread"):
            torch.autograd.backward((out, aux_loss), upstream)
        found = {"output": out, "aux_loss": aux_loss} if keep else {}
        for name, leaf in leaves.items():
            if keep:
                found[name] = leaf.grad
            leaf.grad = None
        return found

    return {mode: partial(step, layer, mode) for mode, layer in layers.items()}


def stack_step(p: Problem, precision: str) -> Callable[[], None]:
    """A step of a stack of layers, whose auxiliary losses are summed."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        sizes, options = (p.E, p.K, p.H, p.I), PRECISIONS[precision]
        layers = [MoE(*sizes, std=0.02, dtype=torch.bfloat16, **options) for _ in range(STACK)]
        x = torch.randn(p.T, p.H, dtype=torch.bfloat16, requires_grad=True)
        dout = torch.randn_like(x)
    leaves = [x, *(weight for layer in layers for weight in layer.parameters())]

    def step() -> None:
        out, losses = x, []
        for layer in layers:
            out, aux_loss = layer(out)
            losses.append(aux_loss)
        torch.autograd.backward((out, *losses), (dout, *map(torch.ones_like, losses)))
        for leaf in leaves:
            leaf.grad = None

    for _ in range(WARMUP):
        step()
    return step


def checked(steps: dict[str, Step]) -> dict[str, bool]:
    """Which modes have the bits of the eager layer; raises where one is wrong."""
    want = {name: t.detach().clone() for name, t in steps["eager"]().items()}
    same = {}
    for mode, step in steps.items():
        for _ in range(WARMUP):
            step()
        found = step()
        same[mode] = all(torch.equal(found[name], t) for name, t in want.items())
        for name, t in want.items():
            error = ((found[name].float() - t.float()).norm() / t.float().norm()).item()
            allowed = TOLERANCE if mode in ("compiled", "reduce_overhead") else 0.0
            if not error <= allowed:
                raise SystemExit(f"{mode}: {name} differs from eager by {error:.2e}")
    return same


def wall_ms(step: Callable[[], object], one_core: bool = False) -> float:
    with on_one_core() if one_core else nullcontext():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3 / STEPS


@contextmanager
def on_one_core() -> Iterator[None]:
    """All threads of the process on the core of this one, as `taskset` would start it."""
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    for thread in threads:
        os.sched_setaffinity(thread, {max(before[os.getpid()])})
    try:
        yield
    finally:
        for thread, cores in before.items():
            with suppress(ProcessLookupError):  # it may have ended
                os.sched_setaffinity(thread, cores)


def profiled(step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of kernels, their number, and calls of CUDA that launch something; per step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    launches = sum(event.name.startswith(LAUNCHES) for event in profile.events())
    busy = sum(event.device_time for event in device) / 1e3
    return {
        "gpu_busy_ms": busy / STEPS,
        "kernels": len(device) / STEPS,
        "launches": launches / STEPS,
    }


def allocations(step: Callable[[], object]) -> float:
    def count() -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    before = count()
    for _ in range(STEPS):
        step()
    return (count() - before) / STEPS


def measure(layer: str, precision: str, dense_ms: Callable[[], object]) -> list[dict[str, Any]]:
    from torch._dynamo.utils import counters

    counters.clear()
    p = Problem.parse(layer)
    steps = training_steps(p, precision)
    same = checked(steps)
    timed: dict[str, Callable[[], object]] = {
        mode: partial(step, keep=False) for mode, step in steps.items()
    }
    timed |= {"one_core": timed["eager"], "stack": stack_step(p, precision)}
    wall = interleaved(
        {
            mode: partial(wall_ms, call, mode == "one_core")
            for mode, call in (timed | {"dense": dense_ms}).items()
        },
        ROUNDS,
    )
    found = []
    for mode, call in timed.items():
        layers = STACK if mode == "stack" else 1
        each = {"wall_ms": wall[mode], **profiled(call), "allocations": allocations(call)}
        record: dict[str, Any] = {"layer": layer, "precision": precision, "mode": mode}
        record |= {name: round(value / layers, 4) for name, value in each.items()}
        record["wall ÷ gpu_busy"] = round(record["wall_ms"] / record["gpu_busy_ms"], 3)
        record |= {"dense_ms": round(wall["dense"], 4), "same_bits": same.get(mode)}
        record["profiled"] = "afterwards"
        if mode == "reduce_overhead":
            record["cudagraph_skips"] = counters["inductor"]["cudagraph_skips"]
        found.append(record)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", default=LAYERS, metavar="T,H,I,E,K")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    records.add_options(parser)
    args = parser.parse_args()
    steps = list(itertools.product(args.layers, args.precisions))
    if len(steps) > 1:
        given = ["--results", args.results] + (["--commit", args.commit] if args.commit else [])
        for layer, precision in steps:
            own = ["--layers", layer, "--precisions", precision]
            subprocess.run([sys.executable, __file__, *own, *given], check=True)
        return
    [(layer, precision)] = steps
    made = records.Records("graphs", "cuda", records.command("graphs.py", sys.argv[1:]), args)
    _, both = dense(Problem.parse(layer), "cuda", torch.bfloat16)
    both()
    for record in measure(layer, precision, both):
        made.keep(record)


if __name__ == "__main__":
    main()
