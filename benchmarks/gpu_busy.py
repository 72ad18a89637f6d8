"""GPU-busy time of the FP8 layer in two checkouts, interleaved, as JSON lines.

    git worktree add ../before COMMIT
    python benchmarks/gpu_busy.py ../before/src src

Busy time is the sum of the kernels' durations in a training step, as PyTorch's profiler reports
them: the host does not count. One process per checkout holds the layer; they run alternately.
"""

import argparse
import json
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import torch
from before_after import LARGE

STEPS, WARMUP = 6, 12  # training steps of a round, and before the first round


# --- a worker: one checkout -----------------------------------------------------------------------
def busy_ms(step) -> dict[str, float]:
    """Milliseconds of each kernel in a step."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0.0) + event.device_time / 1e3 / STEPS
    return found


def training_step(sizes, cached: bool):
    from sonicmoe import MoE  # of the checkout that is measured

    T, H, I, E, K = sizes
    torch.manual_seed(0)
    with torch.device("cuda"):
        options: dict[str, Any] = {"precision": "fp8", "cache_fp8_weights": cached}
        moe = MoE(E, K, H, I, std=0.02, dtype=torch.bfloat16, **options)
        x = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
        dout = torch.randn_like(x)
    leaves = [x, *moe.parameters()]

    def step() -> None:
        out, aux_loss = moe(x)
        torch.autograd.backward((out, aux_loss), (dout, torch.ones_like(aux_loss)))
        for leaf in leaves:
            leaf.grad = None

    return step


def work() -> None:
    """Answer each line of the input, "NAME CACHED" or "again", with a JSON line."""
    step = None
    for line in sys.stdin:
        if line.strip() != "again":
            name, cached = line.split()
            step = None
            torch.cuda.empty_cache()
            step = training_step(LARGE[name], cached == "True")
            for _ in range(WARMUP):
                step()
        print(json.dumps(busy_ms(step)), flush=True)


# --- both -----------------------------------------------------------------------------------------
class Worker:
    def __init__(self, source: str) -> None:
        command = [sys.executable, __file__, "--work", source]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def compare(workers: dict[str, Worker], name: str, cached: bool, rounds: int) -> dict[str, Any]:
    for worker in workers.values():
        worker.send(f"{name} {cached}")  # both compile at once
    for worker in workers.values():
        worker.answer()
    found: dict[str, list[dict[str, float]]] = {label: [] for label in workers}
    for number in range(rounds):
        order = list(workers.items())
        for label, worker in order if number % 2 == 0 else reversed(order):
            worker.send("again")
            found[label].append(worker.answer())
    record: dict[str, Any] = {"layer": name, "weights kept": cached}
    for label, measured in found.items():
        record[label] = round(statistics.median(sum(kernels.values()) for kernels in measured), 4)
        names = {kernel for kernels in measured for kernel in kernels}
        each = {k: statistics.median(kernels.get(k, 0.0) for kernels in measured) for k in names}
        largest = sorted(each.items(), key=lambda item: -item[1])[:14]
        record[f"kernels {label}"] = {kernel[:60]: round(ms, 4) for kernel, ms in largest}
    record["after ÷ before"] = round(record["after"] / record["before"], 4)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="folder src of one checkout")
    parser.add_argument("after", help="folder src of the other")
    parser.add_argument("--layers", default=",".join(LARGE))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--weights", default="kept,quantized", help="kept, quantized or both")
    args = parser.parse_args()
    about = {"date": datetime.now(UTC).isoformat(), "device": torch.cuda.get_device_name()}
    about |= {"torch": torch.__version__, "command": " ".join(sys.argv)}
    print(json.dumps(about), flush=True)
    workers = {"before": Worker(args.before), "after": Worker(args.after)}
    for name in args.layers.split(","):
        for weights in args.weights.split(","):
            print(json.dumps(compare(workers, name, weights == "kept", args.rounds)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        sys.path.insert(0, sys.argv[2])
        work()
    else:
        main()
