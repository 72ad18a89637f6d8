"""Cold start: first call of a process with empty caches, first calls with a new T."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import sonicmoe
from sonicmoe.tools.cases import Case

_NEW = 15  # numbers of tokens; the median of five differed by 10% from run to run
SOURCES = [str(Path(sonicmoe.__file__).parents[1]), str(Path(__file__).resolve().parents[1])]


def measure_cold(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Run one case in a new process with empty kernel caches; times of its first calls."""
    request = {
        "shape": str(case.problem),
        "activation": case.activation.value,
        "bias": case.bias,
        "router": case.router,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
    }
    with tempfile.TemporaryDirectory() as empty:
        path = os.pathsep.join([*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])
        caches = {
            "TRITON_CACHE_DIR": f"{empty}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{empty}/torch",
        }
        done = subprocess.run(
            [sys.executable, "-m", "research.cold", json.dumps(request)],
            env=os.environ | caches | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the cold process failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _in_this_process(request: dict) -> dict[str, float]:
    from sonicmoe.enums import ActivationType
    from sonicmoe.tools.candidates import ours
    from sonicmoe.tools.inputs import make_inputs

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
