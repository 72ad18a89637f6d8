"""An H200 that is not there: CPU tensors take the path to its kernels, which are only noted."""

import importlib

import pytest

from sonicmoe import validation
from sonicmoe.launch import launcher
from sonicmoe.layer import prepare
from sonicmoe.tuning import Target

MODULES = ("grouped_gemm", "fp8", "fp8_dz", "fp8_scales", "fp8_wgrad", "quantize", "routing")
H200, A100 = Target(90, 132), Target(80, 108)


def present(monkeypatch: pytest.MonkeyPatch, target: Target = H200) -> list[str]:
    """From now on; the list is filled with the names of the kernels that calls with data launch.

    Launches on the meta device stay what they are.
    """
    launched: list[str] = []
    launch = launcher.launch

    def noted(kernel, grid, *args, **options):
        first = args[0][0] if type(args[0]) is tuple else args[0]
        if first.is_meta:
            launch(kernel, grid, *args, **options)
        else:
            function = kernel.kernel if type(kernel) is launcher.Bound else kernel
            launched.append(function.__name__)

    for name in MODULES:
        module = importlib.import_module(f"sonicmoe.launch.{name}")
        monkeypatch.setattr(module, "launch", noted)
        if hasattr(module, "target_of"):
            monkeypatch.setattr(module, "target_of", lambda t: target)
    monkeypatch.setattr(validation, "_interpreting", lambda: True)
    monkeypatch.setattr(prepare, "resolve_backend", lambda backend, x: "triton")
    monkeypatch.setattr("sonicmoe.ops.fp8.fp8_backend", lambda backend, x: backend)
    return launched
