"""What a maintainer needs to know about a machine: `sonicmoe doctor --report`."""

import importlib.metadata
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from ..extras import PACKAGE
from ..functional import experts, topk_scores
from ..moe import MoE
from .doctor import report

_PACKAGES = ("transformers", "peft", "accelerate", "trl", "deepspeed", "torchtitan", "torchao")
_VARIABLES = ("SONICMOE_", "TRITON_", "CUDA_", "TORCH", "PYTORCH_", "NCCL_", "CUBLAS_")
_ASKED = """What you called, with shapes (T,H,I,E,K), dtype and options:

What you expected, and what happened (the whole traceback):

```
{facts}
```"""


def bug_report() -> str:
    """A form in Markdown, with the facts about this machine filled in."""
    facts = "\n".join([report(), *(f"{name:<10}{text}" for name, text in _facts())])
    return _ASKED.format(facts=facts.replace(f"{Path.home()}{os.sep}", f"~{os.sep}"))


def _facts() -> Iterable[tuple[str, str]]:
    yield "files", str(PACKAGE)
    in_a_clone = PACKAGE.parent.name == "src"
    if in_a_clone and (commit := _output("git", "-C", str(PACKAGE), "describe", "--always")):
        yield "commit", commit
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    if driver := _output("nvidia-smi", *query):
        yield "driver", driver.splitlines()[0]
    found = [f"{name} {version}" for name in _PACKAGES if (version := _version(name))]
    yield "beside it", ", ".join(found) or "no framework"
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES):
            yield "variable", f"{name}={os.environ[name]}"
    yield "a layer", check_layer("cuda" if torch.cuda.is_available() else "cpu")


def check_layer(device: str) -> str:
    """Run both passes of a small layer: how far off they are and how long they took, or why not."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    try:
        given = [torch.randn(shape, device=device) for shape in ((128, 64), (128, 8), (128, 64))]
        x, logits, upstream = (t.to(dtype) for t in given)
        moe = MoE(8, 2, 64, 32, device=device, dtype=dtype)
        before = time.perf_counter()
        scores, ids = topk_scores(logits, 2)
        w1, w2 = moe.c_fc.weight, moe.c_proj.weight
        found = _both_passes(x, ids, scores, w1, w2, upstream)
        moe(x)
        seconds = time.perf_counter() - before
        s64, w1_64, w2_64, up64 = (t.detach().double() for t in (scores, w1, w2, upstream))
        true = _both_passes(x.double(), ids, s64, w1_64, w2_64, up64, backend="torch")
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return f"raises {type(error).__name__}: {lines[0]}"
    off = ((found.double() - true).norm() / true.norm()).item()
    return f"both passes on {device} in {seconds:.1f} s, {off:.1e} from fp64 ({dtype})"


def _both_passes(x, ids, scores, w1, w2, upstream, backend: str | None = None) -> torch.Tensor:
    """(2, T, H): the output and the gradient of x."""
    x = x.detach().requires_grad_()
    out = experts(x, ids, scores, w1, w2, backend=backend)
    return torch.stack([out.detach(), *torch.autograd.grad(out, x, upstream)])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """What a command prints; nothing if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
