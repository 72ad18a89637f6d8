"""Hash what the layer computes on a GPU, to see that a change leaves every bit as it was.

    git worktree add ../before COMMIT
    PYTHONPATH=../before/src python tests/support/result_hashes.py before.json
    PYTHONPATH=src python tests/support/result_hashes.py after.json

The cases are those of the GPU test matrix and some of the experts in FP8; `--every N` takes each
N-th of them.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from helpers import Case, bits, make_inputs, ours, run
from matrix import CASES

from sonicmoe import ActivationType, experts

# Sizes (T, H, I, E, K), activation, order of gate and up, precision, memory policy.
Fp8Case = tuple[tuple[int, ...], str, str, str, str]
FP8_CASES: list[Fp8Case] = list(
    itertools.product(
        [(1000, 512, 384, 6, 2), (3000, 2048, 768, 16, 4)],
        ["swiglu", "relu_sq"],
        ["interleaved", "concatenated"],
        ["fp8", "fp8_bf16_dw"],
        ["keep", "fp8", "recompute"],  # "fp8", which is now "e4m3", so that both commits know it
    )
)


def in_fp8(case: Fp8Case) -> dict[str, Any]:
    (tokens, hidden, inner, number, k), activation, gate_up, precision, memory = case
    act = ActivationType(activation)
    columns = 2 * inner if act.is_gated else inner
    torch.manual_seed(0)

    def new(*shape: int, scale: float = 1.0) -> torch.Tensor:
        t = torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale
        return t.requires_grad_()

    x, w1 = new(tokens, hidden), new(number, columns, hidden, scale=hidden**-0.5)
    w2 = new(number, hidden, inner, scale=inner**-0.5)
    scores, ids = torch.rand(tokens, number, device="cuda").topk(k, 1)
    scores.requires_grad_()
    options: dict[str, Any] = {
        "activation": act,
        "gate_up": gate_up,
        "precision": precision,
        "memory": memory,
    }
    out = experts(x, ids, scores, w1, w2, **options)
    out.backward(torch.randn_like(out))
    of = {"x": x, "scores": scores, "w1": w1, "w2": w2}
    return {"out": out.detach(), **{f"d{name}": t.grad for name, t in of.items()}}


def hashes(case: Case | Fp8Case) -> dict[str, str]:
    """SHA-256 of the output and of every gradient."""
    if isinstance(case, Case):
        results = run(ours(case, "triton"), make_inputs(case, "cuda"))
    else:
        results = in_fp8(case)
    return {
        name: hashlib.sha256(bits(t).cpu().numpy().tobytes()).hexdigest()
        for name, t in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    cases = [*CASES, *FP8_CASES][:: args.every]
    workers = min(12, os.cpu_count() or 1)
    os.environ["LOCAL_WORLD_SIZE"] = str(workers)  # else each compiles in a thread for each core
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(map(str, cases), pool.map(hashes, cases), strict=True))
    args.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} cases, torch {torch.__version__}, {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
