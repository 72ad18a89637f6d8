"""Time forward and backward of one checkout, as a JSON line, to compare two commits on a GPU.

    git worktree add ../before COMMIT
    for _ in 1 2 3; do
      python benchmarks/before_after.py ../before/src before
      python benchmarks/before_after.py src after
    done

Times are by the clock; small layers are timed alone, and per layer in a stack of eight.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch

LARGE = {
    "7b-fine": (24576, 1536, 256, 128, 8),
    "olmoe": (32768, 2048, 1024, 64, 8),
    "30b-fine": (32768, 4096, 256, 256, 16),
    "120b": (32768, 4096, 1024, 128, 8),
    "qwen3-next": (32768, 2048, 512, 512, 10),
}
SMALL = {"2048": (2048, 2048, 1024, 64, 8), "tiny": (64, 128, 64, 8, 2)}


def training_step(sizes: tuple[int, ...], layers: int = 1) -> Callable[[], None]:
    from sonicmoe import MoE  # of the checkout that is measured

    T, H, I, E, K = sizes
    torch.manual_seed(0)
    with torch.device("cuda"):
        stack = [MoE(E, K, H, I, std=0.02).bfloat16() for _ in range(layers)]
        x = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
        dout = torch.randn_like(x)
    leaves = [x, *(p for moe in stack for p in moe.parameters())]

    def step() -> None:
        h, loss = x, torch.zeros((), device="cuda")
        for moe in stack:
            out, aux_loss = moe(h)
            h, loss = (h + out if layers > 1 else out), loss + aux_loss
        torch.autograd.backward((h, loss), (dout, torch.ones_like(loss)))
        for leaf in leaves:
            leaf.grad = None

    return step


def milliseconds(step: Callable[[], None], calls: int) -> float:
    """Median of nine groups of calls, by the clock."""
    for _ in range(5):
        step()
    found = []
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - begin) / calls)
    return round(statistics.median(found), 4)


def main() -> None:
    if len(sys.argv) != 3 or not torch.cuda.is_available():
        sys.exit("usage, on a machine with a GPU: python benchmarks/before_after.py SRC LABEL")
    sys.path.insert(0, sys.argv[1])
    record: dict[str, object] = {"label": sys.argv[2], "date": datetime.now(UTC).isoformat()}
    record |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, sizes in LARGE.items():
        record[name] = milliseconds(training_step(sizes), 5)
        torch.cuda.empty_cache()
    for name, sizes in SMALL.items():
        record[f"{name} alone"] = milliseconds(training_step(sizes), 40)
        record[f"{name} in a stack"] = round(milliseconds(training_step(sizes, 8), 8) / 8, 4)
        torch.cuda.empty_cache()
    print(json.dumps(record))


if __name__ == "__main__":
    main()
