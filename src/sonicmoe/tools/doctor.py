"""What is installed, which backend runs, and what is missing: `sonicmoe doctor`."""

import os
import platform
import shutil
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

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
    found = []
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
        *(("tuned", text) for text in _tuned(machine)),
        *(("hint", hint) for hint in hints(machine)),
    ]
    return "\n".join(f"{name:<10}{text}" for name, text in lines)


def main() -> int:
    print(report())
    return 0


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


if __name__ == "__main__":
    raise SystemExit(main())
