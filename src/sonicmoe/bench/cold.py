"""The first call of a process with empty caches, and the first call with a new number of tokens.

    python -m sonicmoe.bench.cold 24576,1536,256,128,8 cuda
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]


def measure_cold(shape: str, device: str) -> dict[str, float]:
    """Figures of a new process whose kernel caches are empty."""
    with tempfile.TemporaryDirectory() as empty:
        path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        caches = {"TRITON_CACHE_DIR": f"{empty}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
        done = subprocess.run(
            [sys.executable, "-m", "sonicmoe.bench.cold", shape, device],
            env=os.environ | caches | {"PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the cold process failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _in_this_process(shape: str, device: str) -> dict[str, float]:
    from .cases import Case
    from .inputs import make_inputs
    from .subjects import ours
    from .timing import wall_ms

    case = Case.of_shape(shape)
    known = ours(make_inputs(case, device=device), router=True)
    first = wall_ms(known.forward_backward, device)
    steady = statistics.median(wall_ms(known.forward_backward, device) for _ in range(10))
    tokens = case.problem.T * 3 // 4 + 1
    new = ours(make_inputs(case.with_tokens(tokens), device=device), router=True)
    new_first = wall_ms(new.forward_backward, device)
    new_steady = statistics.median(wall_ms(new.forward_backward, device) for _ in range(10))
    return {
        "cold_first_call_s": first / 1e3,
        "steady_ms": steady,
        "new_tokens_first_ms": new_first,
        "new_tokens_steady_ms": new_steady,
    }


if __name__ == "__main__":
    print(json.dumps(_in_this_process(*sys.argv[1:3])))
