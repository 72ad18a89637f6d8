"""The published SonicMoE, in a process of its own: its import name is ours.

`measure_published` starts this file as a script. There `sonicmoe` is the published package, found
in the folder the user names, and our own modules go by the name `instruments`.
"""

import json
import os
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path

NAME = "published"
TIMEOUT_S = 580  # its first call compiles and benchmarks for minutes


def measure_published(folder: str, case, routing: str, dtype: str, device: str = "cuda") -> dict:
    """Figures of the published package on the inputs of a case, or {"error": …}."""
    request = {
        "folder": str(Path(folder).resolve()),
        "routing": routing,
        "dtype": dtype,
        "device": device,
        "problem": asdict(case.problem),
        "activation": case.activation.value,
        "router": case.router,
    }
    # Its compiling processes start one after the other, 5 to 7 s each, anew for each of its
    # kernels: with 15 of them 440 s were not enough for one shape on 16 cores.
    env = {"QUACK_COMPILE_WORKERS": "1"} | os.environ
    env["PYTHONPATH"] = _search_path(request["folder"])
    try:
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(request)],
            env=env, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TIMEOUT_S} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _search_path(folder: str) -> str:
    """The folder and what its .pth files name, also for the processes that the package starts."""
    named = [
        str(Path(folder, line))
        for file in sorted(Path(folder).glob("*.pth"))
        for line in file.read_text().splitlines()
        if line and not line.startswith(("#", "import "))
    ]
    return os.pathsep.join([folder, *named])


def _instruments() -> None:
    """Make our modules importable as `instruments.*` without running our package's own import."""
    package = types.ModuleType("instruments")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["instruments"] = package


def _answer(request: dict) -> dict:
    sys.path = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]
    _instruments()
    import torch
    from instruments.bench.cases import Case
    from instruments.bench.inputs import make_inputs
    from instruments.bench.measure import measure
    from instruments.bench.subjects import Subject, leaves_of
    from instruments.bench.timing import is_cuda, wall_ms
    from instruments.bench.verify import passed, verify
    from instruments.enums import ActivationType
    from instruments.shapes import Problem

    from sonicmoe.enums import ActivationType as TheirActivation
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    activation = ActivationType(request["activation"])
    problem = Problem(**request["problem"])
    case = Case(NAME, problem, activation, router=request["router"])
    i = make_inputs(case, request["routing"], request["device"], getattr(torch, request["dtype"]))
    on_gpu = is_cuda(request["device"])
    stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
    options = {}
    if case.router != "softmax_over_topk":
        options["is_softmax_over_topk"] = False
        options["norm_topk_probs"] = case.router == "topk_over_softmax_normalized"

    def forward() -> torch.Tensor:
        return moe_TC_softmax_topk_layer(
            i.x, i.router_w, i.w1.permute(1, 2, 0), None, i.w2.permute(1, 2, 0), None,
            problem.K, stream, TheirActivation[activation.name], False, **options,
        )[0]  # fmt: skip

    subject = Subject(NAME, True, forward, leaves_of(i, router=True), i.dout)
    first = wall_ms(subject.forward_backward, request["device"]) / 1e3
    checks = verify(subject, i, peer=True)
    if not passed(checks):
        return {"error": "differs from fp64", "checks": [asdict(check) for check in checks]}
    return {"first_call_s": first, "checks": [asdict(c) for c in checks]} | measure(
        subject, problem
    )


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.argv[1]))))
