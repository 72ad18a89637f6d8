"""GPU-busy and host time of the layer in several checkouts, interleaved, as JSON lines.

    git worktree add ../before COMMIT
    python benchmarks/gpu_busy.py before=../before/src after=src

Busy time is the sum of the kernels' durations in a training step, as PyTorch's profiler reports
them. Host time is what a step takes until its last kernel is launched; that of all layers comes
first, since every launch may take longer once the profiler has run. One process per checkout holds
the layer; they run alternately.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

STEPS, WARMUP = 6, 12  # training steps of a round, and before the first round
LAYERS = {
    "7b-fine": (24576, 1536, 256, 128, 8),
    "olmoe": (32768, 2048, 1024, 64, 8),
    "30b-fine": (32768, 4096, 256, 256, 16),
    "120b": (32768, 4096, 1024, 128, 8),
    "qwen3-next": (32768, 2048, 512, 512, 10),
    "short": (2048, 2048, 1024, 64, 8),
}
MODES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "kept": {"precision": "fp8", "cache_fp8_weights": True},
    "quantized": {"precision": "fp8"},
}


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


def host_ms(step) -> float:
    """Milliseconds until a step has launched its kernels."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    passed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return passed * 1e3 / STEPS


def training_step(sizes, mode: str):
    from sonicmoe import MoE  # of the checkout that is measured

    T, H, I, E, K = sizes
    torch.manual_seed(0)
    with torch.device("cuda"):
        moe = MoE(E, K, H, I, std=0.02, dtype=torch.bfloat16, **MODES[mode])
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
    """Answer each line of the input, "LAYER MODE", "host" or "kernels", with a JSON line."""
    step = None
    for line in sys.stdin:
        found: Any = None
        if line.strip() == "host":
            found = host_ms(step)
        elif line.strip() == "kernels":
            found = busy_ms(step)
        else:
            layer, mode = line.split()
            step = None
            torch.cuda.empty_cache()
            step = training_step(LAYERS[layer], mode)
            for _ in range(WARMUP):
                step()
        print(json.dumps(found), flush=True)


# --- both -----------------------------------------------------------------------------------------
class Worker:
    def __init__(self, source: str) -> None:
        command = [sys.executable, __file__, "--work", source]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def interleaved(
    workers: dict[str, Worker], layer: str, mode: str, rounds: int, what: str
) -> dict[str, list]:
    """The answers of each checkout to `what`, "host" or "kernels"."""
    for worker in workers.values():
        worker.send(f"{layer} {mode}")  # all compile at once
    for worker in workers.values():
        worker.answer()
    found: dict[str, list] = {label: [] for label in workers}
    for number in range(rounds):
        order = list(workers.items())
        for label, worker in order if number % 2 == 0 else reversed(order):
            worker.send(what)
            found[label].append(worker.answer())
    return found


def summary(hosts: dict[str, list[float]], kernels: dict[str, list[dict]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for label, measured in kernels.items():
        record[label] = round(statistics.median(sum(each.values()) for each in measured), 4)
        record[f"host {label}"] = round(min(hosts[label]), 4)
        names = {name for each in measured for name in each}
        median = {k: statistics.median(each.get(k, 0.0) for each in measured) for k in names}
        largest = sorted(median.items(), key=lambda item: -item[1])[:14]
        record[f"kernels {label}"] = {kernel[:60]: round(ms, 4) for kernel, ms in largest}
    first, *others = kernels
    for label in others:
        record[f"{label} ÷ {first}"] = round(record[label] / record[first], 4)
    return record


def main() -> None:
    from research import records  # not in a worker, which takes sonicmoe from its checkout

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words = "the folder src of a checkout; times are divided by those of the first"
    parser.add_argument("checkouts", nargs="+", metavar="LABEL=SRC", help=words)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--modes", default=",".join(MODES), help="of the experts")
    records.add_options(parser)
    args = parser.parse_args()
    command = records.command("gpu_busy.py", sys.argv[1:])
    made = records.Records("gpu busy", "cuda", command, args)
    checkouts = (checkout.split("=", 1) for checkout in args.checkouts)
    workers = {label: Worker(source) for label, source in checkouts}
    steps = list(itertools.product(args.layers.split(","), args.modes.split(",")))
    hosts = {step: interleaved(workers, *step, args.rounds, "host") for step in steps}
    for layer, mode in steps:
        kernels = interleaved(workers, layer, mode, args.rounds, "kernels")
        made.keep({"layer": layer, "mode": mode} | summary(hosts[layer, mode], kernels))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        sys.path.insert(0, sys.argv[2])
        work()
    else:
        main()
