"""Time and memory of each memory policy at the five layers of the README, in bf16 and in FP8.

    python benchmarks/memory_policies.py

Milliseconds of forward and backward by the GPU's clock, medians of policies that take turns; MiB
kept from forward to backward and at the peak, beside inputs and weights. FP8 quantizes its weights
in every call.
"""

import gc
import statistics
import sys
from dataclasses import astuple

import torch
from research import results

from sonicmoe import MemoryPolicy, MoE
from sonicmoe.tools.cases import find_case

LAYERS = ("7b-fine", "olmoe", "30b-fine", "120b", "qwen3-next")
POLICIES = {
    "keep": MemoryPolicy(),
    "fp8": MemoryPolicy("e4m3"),
    "recompute": MemoryPolicy("recompute"),
    "4 slices": MemoryPolicy(slices=4),
    "fp8, 4 slices": MemoryPolicy("e4m3", 4),
    "recompute, 4 slices": MemoryPolicy("recompute", 4),
}
ROUNDS, CALLS, MIB = 9, 3, 2**20


def measure(name: str, sizes: tuple[int, ...], precision: str | None) -> list[results.Record]:
    """One record per policy; all share the weights of one layer."""
    T, H, I, E, K = sizes
    torch.manual_seed(0)
    options = {"std": 0.02, "device": "cuda", "dtype": torch.bfloat16}
    moe = MoE(E, K, H, I, precision=precision, **options)
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    leaves = [x, *moe.parameters()]

    def step() -> int:
        """One training step; returns the bytes kept between its halves."""
        before = torch.cuda.memory_allocated()
        out, aux_loss = moe(x)
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        torch.autograd.backward((out, aux_loss), (dout, torch.ones_like(aux_loss)))
        for leaf in leaves:
            leaf.grad = None
        return kept

    memory: dict[str, dict[str, float]] = {}
    times: dict[str, list[float]] = {label: [] for label in POLICIES}
    for label, policy in POLICIES.items():
        moe.memory = policy
        step()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        memory[label] = {"kept_mib": round(kept / MIB, 1), "peak_mib": round(peak / MIB, 1)}
    for _ in range(ROUNDS):
        for label, policy in POLICIES.items():
            moe.memory = policy
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                step()
            end.record()
            torch.cuda.synchronize()
            times[label].append(begin.elapsed_time(end) / CALLS)
    keep, records = statistics.median(times["keep"]), []
    for label, found in times.items():
        ms = statistics.median(found)
        record = {"case": name, "shape": ",".join(map(str, sizes)), "memory": label}
        record |= {"dtype": "bfloat16", "precision": precision}
        record |= {"ms": round(ms, 3), "relative": round(ms / keep, 3), **memory[label]}
        print(record, flush=True)
        records.append(record)
    return records


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("memory_policies.py needs a GPU")
    origin = results.provenance("cuda", "python benchmarks/memory_policies.py")
    for name in LAYERS:
        sizes = astuple(find_case(name).problem)[:5]
        for precision in (None, "fp8"):
            found = measure(name, sizes, precision)
            found = [origin | {"kind": "memory policies"} | record for record in found]
            results.write(found, results.RESULTS, "memory-policies")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
