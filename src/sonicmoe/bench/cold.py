"""Cold start: first call of a process with empty caches, first calls with a new T."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from .cases import Case

_NEW = 15  # numbers of tokens; the median of five differed by 10% from run to run
SOURCE = Path(__file__).resolve().parents[2]


def measure_cold(case: Case, device: str, dtype: str) -> dict[str, float]:
    """Run one case in a new process with empty kernel caches; times of its first calls."""
    request = {
        "shape": str(case.problem),
        "activation": case.activation.value,
        "bias": case.bias,
        "router": case.router,
        "device": device,
        "dtype": dtype,
    }
    with tempfile.TemporaryDirectory() as empty:
        path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        caches = {
            "TRITON_CACHE_DIR": f"{empty}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{empty}/torch",
        }
        done = subprocess.run(
            [sys.executable, "-m", "sonicmoe.bench.cold", json.dumps(request)],
            env=os.environ | caches | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the cold process failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _in_this_process(request: dict) -> dict[str, float]:
    import torch

    from ..enums import ActivationType
    from .candidates import ours
    from .inputs import make_inputs
    from .timing import wall_ms

    device, dtype = request["device"], getattr(torch, request["dtype"])
    activation = ActivationType(request["activation"])
    case = Case.of_shape(request["shape"], activation, request["bias"], request["router"])

    def first_and_steady(case: Case) -> tuple[float, float]:
        layer = ours(make_inputs(case, device=device, dtype=dtype), router=True)
        first = wall_ms(layer.forward_backward, device)
        return first, statistics.median(wall_ms(layer.forward_backward, device) for _ in range(10))

    first, steady = first_and_steady(case)
    # The first of several also allocates device memory of a new size; the median excludes that.
    most = case.problem.T * 3 // 4 + 1
    others = [first_and_steady(case.with_tokens(max(most - 7 * i, 1))) for i in range(_NEW)]
    new_first, new_steady = (statistics.median(times) for times in zip(*others, strict=True))
    return {
        "cold_first_call_s": first / 1e3,
        "steady_ms": steady,
        "new_tokens_first_ms": new_first,
        "new_tokens_steady_ms": new_steady,
    }


if __name__ == "__main__":
    print(json.dumps(_in_this_process(json.loads(sys.argv[1]))))
