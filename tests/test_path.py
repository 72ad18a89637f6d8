"""The path from the layer to a kernel launch stays short: docs/design.md draws it."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton, which is for Linux")

from machine_code import compiling
from triton.runtime.jit import JITFunction

import sonicmoe
from sonicmoe import KernelBackendMoE, MoE, validation
from sonicmoe.launch import grouped_gemm
from sonicmoe.layer.memory import Z_POLICIES

PACKAGE = Path(sonicmoe.__file__).parent
FIRST = {"moe.py": "forward", "layer/nodes.py": "backward"}


@pytest.fixture(autouse=True)
def _launches_of_nothing(monkeypatch):
    """CPU tensors reach the launch of a kernel, which is not even compiled."""
    monkeypatch.setattr(validation, "_interpreting", lambda: True)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: None)


def frames_of_ours() -> list[tuple[str, str]]:
    """File and function of each frame of the package, the launch first, the layer last."""
    found = []
    for frame in inspect.stack(context=0):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            found.append((str(path.relative_to(PACKAGE)), frame.function))
            if FIRST.get(found[-1][0]) == frame.function and "test" not in frame.filename:
                break
    return found


def test_few_frames_from_the_layer_to_a_launch(monkeypatch):
    launch, paths = grouped_gemm.launch, []

    def recorded(kernel, grid, *args, **options):
        paths.append(frames_of_ours())
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(grouped_gemm, "launch", recorded)
    moe = MoE(8, 2, 64, 32, add_bias=True).to(torch.bfloat16)
    x = torch.zeros(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with compiling(90):
        out, _ = moe(x, KernelBackendMoE.sonicmoe)
        forward = len(paths)
        out.sum().backward()
    # `launch` comes on top.
    assert forward == 3 and len(paths) >= 9
    for path in paths[:forward]:
        assert path[-1] == ("moe.py", "forward"), path
    for path in paths[forward:]:
        assert path[-1] == ("layer/nodes.py", "backward"), path
    for path in paths:
        assert len(path) <= 7 and len({file for file, _ in path}) <= 6, path


def test_few_frames_from_the_layer_in_fp8_to_a_launch(monkeypatch):
    from sonicmoe.launch import fp8, fp8_dz, fp8_wgrad, quantize

    monkeypatch.setattr("sonicmoe.ops.fp8.fp8_backend", lambda backend, x: backend)
    launch, paths = grouped_gemm.launch, []

    def recorded(kernel, grid, *args, **options):
        paths.append(frames_of_ours())
        launch(kernel, grid, *args, **options)

    for module in (fp8, fp8_dz, fp8_wgrad, grouped_gemm, quantize):
        monkeypatch.setattr(module, "launch", recorded)
    moe = MoE(8, 2, 64, 32, precision="fp8").to(torch.bfloat16)
    x = torch.zeros(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with compiling(90):
        out, _ = moe(x, KernelBackendMoE.sonicmoe)
        forward = len(paths)
        out.sum().backward()
    assert forward >= 5 and len(paths) >= 12
    for path in paths:
        assert path[-1] in (("moe.py", "forward"), ("layer/nodes.py", "backward")), path
        assert len(path) <= 7, path


# --- how the modules depend on each other ---------------------------------------------------------
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def test_private_names_stay_in_their_modules():
    for path, tree in trees().items():
        nodes = list(ast.walk(tree))
        imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.level]
        names = {alias.asname or alias.name: alias.name for n in imports for alias in n.names}
        found = [name for name in names.values() if name.startswith("_") and name != "__version__"]
        for n in nodes:
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name):
                module = names.get(n.value.id, "")
                if module.islower() and n.attr.startswith("_") and not n.attr.startswith("__"):
                    found.append(f"{module}.{n.attr}")
        assert not found, path


def test_memory_policies_are_named_in_one_module():
    """Docstrings and messages may name them. `train` has other options of these names."""
    for path, tree in trees().items():
        if path.relative_to(PACKAGE).parts[0] != "train" and path.name != "memory.py":
            texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
            assert not texts & set(Z_POLICIES), path
