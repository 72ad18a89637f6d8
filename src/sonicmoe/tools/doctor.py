"""What is installed, which backend runs, what is missing, and what a report of a bug needs."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..extras import PACKAGE, TESTED, tested

TUNED = (9, 0)
OLDEST = (8, 0)


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    gib: float

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name}, sm_{major}{minor}, {self.gib:.0f} GiB"


@dataclass(frozen=True, slots=True)
class Machine:
    """What `backend` and `hints` look at; None: not found."""

    triton: str | None
    interpreting: bool
    gpus: tuple[Gpu, ...]
    torch_for_gpu: bool
    gpu_complaint: str | None  # what torch says about a GPU that it cannot use
    driver_tool: str | None
    compiler: str | None
    python_header: str | None
    versions: dict[str, str]  # of what `TESTED` names


def inspect() -> Machine:
    triton, interpreting = _triton()
    gpus, complaint = _gpus()
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return Machine(
        triton=triton,
        interpreting=interpreting,
        gpus=gpus,
        torch_for_gpu=bool(torch.version.cuda or torch.version.hip),
        gpu_complaint=complaint,
        driver_tool=shutil.which("nvidia-smi") or shutil.which("rocm-smi"),
        compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        python_header=str(header) if header.exists() else None,
        versions=_versions(),
    )


def backend(machine: Machine) -> str:
    """Which backend a call without `backend=` uses on this machine, and why."""
    if not machine.gpus:
        return "torch (plain PyTorch), because no GPU can be used"
    if machine.triton is None:
        return "none for GPU tensors, because Triton is missing; backend='torch' runs"
    capability = machine.gpus[0].capability
    tuned = "tuned for it" if capability == TUNED else "compiled for it, tuned for sm_90"
    return f"triton for GPU tensors ({tuned}), torch (plain PyTorch) for others"


def hints(machine: Machine) -> list[str]:
    """A sentence for each thing that is wrong or slow: what, and how to fix it."""
    found = [*_untested(machine.versions)]
    if machine.driver_tool and not machine.torch_for_gpu:
        found.append("There is a GPU driver, but torch is built for the CPU: install a GPU build.")
    if machine.gpu_complaint:
        found.append(f"torch cannot use the GPU: {machine.gpu_complaint}")
    if machine.interpreting:
        found.append("TRITON_INTERPRET is set: kernels run on the CPU, very slowly. Unset it.")
    for gpu in machine.gpus:
        if gpu.capability < OLDEST:
            found.append(f"{gpu} is older than sm_80: use backend='torch' there.")
    if not machine.gpus:
        return found
    if machine.triton is None:
        found.append("Triton cannot be imported. Install it: pip install triton")
    if machine.compiler is None:
        found.append("Triton builds its launcher with a C compiler. Install gcc, or set CC to one.")
    if machine.python_header is None:
        found.append("Python.h is missing, which Triton's launcher includes. Install python3-dev.")
    return found


def _untested(versions: dict[str, str]) -> Iterator[str]:
    for name, version in versions.items():
        oldest, newest = TESTED[name]
        if _numbers(version) < _numbers(oldest):
            yield f"{name} {version} is too old: install {oldest} or newer."
        elif _numbers(version) > _numbers(newest):
            yield (
                f"{name} {version} is newer than what was tested ({oldest} to {newest}), and will"
                " probably work. On a GPU, `sonicmoe verify` compares the kernels with plain"
                " PyTorch."
            )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def _versions() -> dict[str, str]:
    found = {name: _version(name.lower()) for name in TESTED} | {
        "Python": platform.python_version()
    }
    return {name: version for name, version in found.items() if version}


def report() -> str:
    machine = inspect()
    gpus = [str(gpu) for gpu in machine.gpus] or ["none"]
    lines = [
        ("sonicmoe", _own_version()),
        ("python", f"{platform.python_version()} on {sys.platform} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {_built_for()}"),
        ("triton", machine.triton or "not found"),
        *(("gpu", gpu) for gpu in gpus),
        ("compiler", machine.compiler or "not found"),
        ("Python.h", machine.python_header or "not found"),
        ("backend", backend(machine)),
        ("tested", tested()),
        *(("tuned", text) for text in _tuned(machine)),
        *(("hint", hint) for hint in hints(machine)),
    ]
    return "\n".join(f"{name:<10}{text}" for name, text in lines)


def _tuned(machine: Machine) -> list[str]:
    """The table of `sonicmoe tune` for each GPU model."""
    from ..tuning.table import path_of

    paths = [path_of(name) for name in dict.fromkeys(gpu.name for gpu in machine.gpus)]
    return [str(path) if path and path.exists() else "nothing yet" for path in paths]


def _own_version() -> str:
    from .. import __version__

    return __version__


def _built_for() -> str:
    if torch.version.hip:
        return f"built for ROCm {torch.version.hip}"
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"


def _triton() -> tuple[str | None, bool]:
    try:
        import triton
    except ImportError:
        return None, False
    return triton.__version__, bool(triton.knobs.runtime.interpret)


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs that torch can use, and its message about one that it cannot."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            found = [torch.cuda.get_device_properties(i) for i in range(count)]
        except RuntimeError as error:
            return (), str(error).splitlines()[0]
    gpus = tuple(Gpu(p.name, (p.major, p.minor), p.total_memory / 2**30) for p in found)
    complaint = str(caught[0].message).splitlines()[0] if caught and not gpus else None
    return gpus, complaint


# --- a report of a bug ----------------------------------------------------------------------------
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
    """Run both passes of a small layer: what is wrong with them, or what they raise."""
    from .candidates import ours
    from .cases import Case
    from .inputs import make_inputs
    from .verify import verify

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    before = time.perf_counter()
    try:
        inputs = make_inputs(Case.of_shape("128,64,32,8,2"), device=device, dtype=dtype)
        checks = verify(ours(inputs, router=True), inputs)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return f"raises {type(error).__name__}: {lines[0]}"
    wrong = ", ".join(check.tensor for check in checks if not check.passed)
    verdict = f"wrong {wrong}" if wrong else "right"
    return f"both passes on {device} in {time.perf_counter() - before:.1f} s, {verdict} ({dtype})"


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
