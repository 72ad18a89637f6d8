"""Hash what the layer computes on a GPU, to see that a change leaves every bit as it was.

    PYTHONPATH=src python tests/result_hashes.py after.json
    cp tests/result_hashes.py ../before/tests   # a checkout of the commit before
    (cd ../before && PYTHONPATH=src python tests/result_hashes.py ../before.json)

The cases are those of the GPU test matrix; `--every N` takes each N-th of them.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from helpers import Case, bits, make_inputs, ours, run
from test_gpu_matrix import CASES


def hashes(case: Case) -> dict[str, str]:
    """SHA-256 of the output and of every gradient."""
    results = run(ours(case, "triton"), make_inputs(case, "cuda"))
    return {
        name: hashlib.sha256(bits(t).cpu().numpy().tobytes()).hexdigest()
        for name, t in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    cases = CASES[:: args.every]
    workers = min(12, os.cpu_count() or 1)
    os.environ["LOCAL_WORLD_SIZE"] = str(workers)  # else each compiles in a thread for each core
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(map(str, cases), pool.map(hashes, cases), strict=True))
    args.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} cases, torch {torch.__version__}, {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
