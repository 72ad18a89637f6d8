"""The build for the Hugging Face `kernels` loader, in one process with the installed package."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from devices import on, values_on
from helpers import Case, compare, make_inputs, ours, plain, run, same_bits
from hub_builds import load
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sonicmoe
from sonicmoe.integrations import hub

PACKAGE = Path(sonicmoe.__file__).parent
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub")
    hub.build(path)
    return path


@pytest.fixture(scope="module")
def kernel(folder):
    return load(folder)


def in_fresh_python(program: str, folder: Path, *, by_hand: bool = True, **environment: str) -> str:
    """The output of a program in a process of its own; `kernel` is the build, loaded by hand."""
    lines = ["import sys, torch", "from pathlib import Path", "folder = Path(sys.argv[1])"]
    if by_hand:
        lines += ["from hub_builds import load", "kernel = load(folder)"]
    source = "\n".join([*lines, textwrap.dedent(program)])
    folders = [str(PACKAGE.parent), str(SUPPORT), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, "-c", source, str(folder)],
        env=os.environ | environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Namespaces(TorchDispatchMode):
    """Counts operators as (namespace, name)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.namespace, func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


# --- two builds in one process --------------------------------------------------------------------
def test_every_operator_is_in_both_namespaces(kernel):
    assert kernel.MoE is not sonicmoe.MoE
    names = torch._C._dispatch_get_all_op_names()
    ours, theirs = (
        sorted(name.partition("::")[2] for name in names if name.startswith(f"{namespace}::"))
        for namespace in ("sonicmoe", kernel.__name__)
    )
    assert ours == theirs and "up" in ours


def train(package: ModuleType, state: dict, x: torch.Tensor) -> dict[str, torch.Tensor]:
    moe = package.MoE(8, 2, 64, 32, add_bias=True).to(x.device, x.dtype)
    moe.load_state_dict(state)
    x = x.clone().requires_grad_()
    out, aux = moe(x)
    (out.float().square().sum() + aux).backward()
    gradients = {name: p.grad for name, p in moe.named_parameters()}
    return {"out": out.detach(), "aux": aux.detach(), "dx": x.grad, **gradients}


@values_on("dtype", cpu=[torch.float32, torch.bfloat16], cuda=[torch.bfloat16])
def test_same_bits(kernel, device, dtype):
    state = sonicmoe.MoE(8, 2, 64, 32, add_bias=True).to(device, dtype).state_dict()
    x = torch.randn(200, 64, device=device, dtype=dtype)
    want = train(sonicmoe, state, x)
    same_bits(want, train(kernel, state, x))
    same_bits(want, train(sonicmoe, state, x))  # the second build has not changed the first


@on("interpreter")
def test_kernels_of_two_builds(kernel):
    """The same bits, from modules of its own."""
    case = Case("33,24,8,3,2", torch.bfloat16, bias=True, routing="dropped")
    given = make_inputs(case)
    same_bits(
        run(ours(case, "triton"), given), run(partial(kernel.experts, backend="triton"), given)
    )
    assert f"{kernel.__name__}.kernels.triton.gemm" in sys.modules


@pytest.mark.parametrize("dispatched", ["ours", "theirs"])
def test_a_build_calls_its_own_operators(kernel, dispatched):
    package = sonicmoe if dispatched == "ours" else kernel
    moe = package.MoE(4, 2, 16, 8)
    with Namespaces() as mode:
        moe(torch.randn(12, 16))[0].sum().backward()
    namespaces = {n for n, _ in mode.seen if n.startswith("sonicmoe")}
    assert namespaces == {package.__name__}
    assert mode.seen[package.__name__, "up"] == 1


def test_compiles(kernel):
    given = make_inputs(Case("30,16,8,5,2", torch.float32))

    def function(x):
        return kernel.experts(x, given.ids, given.scores, given.w1, given.w2)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given.x), function(given.x))


def test_selective_checkpointing_keeps_the_build_s_operators(kernel):
    selective = importlib.import_module(f"{kernel.__name__}.integrations.checkpointing")
    moe, x = kernel.MoE(4, 2, 16, 8), torch.randn(12, 16)
    runs = []
    for options in ({}, {"context_fn": selective.save_operators("up")}):
        with Namespaces() as mode:
            checkpoint(moe, x, use_reentrant=False, **options)[0].square().sum().backward()
        runs.append(mode.seen[kernel.__name__, "up"])
    assert runs == [2, 1]


def test_the_same_build_from_a_second_folder(kernel, tmp_path):
    """It has the same id: the operators are those of the first, and no name is missing."""
    assert hub.build(tmp_path) == kernel.__name__
    again = load(tmp_path)
    assert again is not kernel and again.experts is kernel.experts
    assert again.enums.ActivationType is kernel.enums.ActivationType


def test_each_build_refuses_models_without_experts_interface(kernel, monkeypatch):
    """Each checks the names that it registered, whichever registers first."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, intermediate_size=8, intermediate_size_mlp=8, num_local_experts=2,
        vocab_size=32, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config)
    for package, name in ((sonicmoe, "sonicmoe_experts"), (kernel, "of_the_build")):
        adapter = importlib.import_module(f"{package.__name__}.integrations.transformers")
        adapter.register(name)
        with pytest.raises(ValueError, match="experts interface, got a name for Llama4ForCausalLM"):
            model.set_experts_implementation(name)
        if package is sonicmoe:  # what the build replaces ends with this test
            base, loading = transformers.PreTrainedModel, transformers.modeling_utils
            for owner, patched in (
                (base, "get_correct_experts_implementation"),
                (loading, "get_hf_quantizer"),
            ):
                monkeypatch.setattr(owner, patched, getattr(owner, patched))


# --- the files ------------------------------------------------------------------------------------
def test_the_package_imports_itself_by_relative_imports_only():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            assert "sonicmoe" not in {name.partition(".")[0] for name in names}, path


def test_every_module_of_a_build_is_importable(folder, kernel):
    """Nothing that is shipped needs a module that is not. Adapters need frameworks, and
    `train` says where the trainer is."""
    found = in_fresh_python(
        """
        import importlib, pkgutil, sonicmoe.launch.launcher
        names = [m.name for m in pkgutil.walk_packages(kernel.__path__, f"{kernel.__name__}.")]
        for name in names:
            if ".integrations." not in name and not name.endswith(".train"):
                importlib.import_module(name)
        print(len(names))
        """,
        folder,
    )
    assert int(found) == len([*PACKAGE.rglob("*.py")]) - 1  # without the package itself


def test_a_changed_file_changes_the_id(monkeypatch, tmp_path, folder, kernel):
    changed = tmp_path / "source"
    shutil.copytree(folder / "build" / "torch-cpu", changed)
    (changed / "metadata.json").unlink()
    monkeypatch.setattr(hub, "_PACKAGE", changed)
    assert hub.build(tmp_path / "same") == kernel.__name__
    with (changed / "errors.py").open("a") as file:
        file.write("# changed\n")
    assert hub.build(tmp_path / "other") != kernel.__name__


def test_command_line(tmp_path, capsys, kernel):
    hub.main([str(tmp_path)])
    assert capsys.readouterr().out.strip() == kernel.__name__
    with pytest.raises(SystemExit) as exit:
        hub.main([str(tmp_path)])
    assert exit.value.code == 1
    assert "expected one without build/torch-cuda" in capsys.readouterr().err


# --- the loader, and what transformers calls ------------------------------------------------------
def test_the_loader_accepts_it_offline(folder, kernel):
    """`LOCAL_KERNELS` puts a folder in the place of a repository."""
    reason = "the loader (pip install kernels) is not installed, or does not know our variants"
    pytest.importorskip("kernels", "0.17", reason)
    program = """
        import kernels, sonicmoe
        from kernels._rust import Digest, DigestAlgorithm, Metadata
        for variant in ("cuda", "cpu"):
            path = folder / "build" / f"torch-{variant}"
            metadata = Metadata.read_from_file(path / "metadata.json")
            assert str(metadata.backend.backend_type) == variant
            metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, path))
        kernel = kernels.get_local_kernel(folder)
        assert kernels.get_kernel("kernels-community/sonic-moe", version=1) is kernel
        moe, same = (package.MoE(4, 2, 16, 8) for package in (sonicmoe, kernel))
        same.load_state_dict(moe.state_dict())
        x = torch.randn(12, 16)
        assert torch.equal(moe(x)[0], same(x)[0])
        print(kernel.__name__)
    """
    overrides = {"HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"kernels-community/sonic-moe={folder}"}
    assert in_fresh_python(program, folder, by_hand=False, **overrides) == kernel.__name__


@pytest.fixture
def integration(kernel, monkeypatch):
    """transformers' own `sonicmoe`, with our build as its kernel and without its need of a GPU."""
    reason = "transformers has no `sonicmoe` of its own"
    module = pytest.importorskip("transformers.integrations.sonicmoe", reason=reason)
    if not hasattr(module, "_SONICMOE"):
        pytest.skip("transformers' own `sonicmoe` loads its kernel in another way")
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return kernel.moe_general_routing_inputs(*args, **kwargs)

    loaded = SimpleNamespace(enums=kernel.enums, moe_general_routing_inputs=counted)
    monkeypatch.setattr(module, "_SONICMOE", None)
    monkeypatch.setattr(module, "is_sonicmoe_loadable", lambda raise_error=False: True)
    monkeypatch.setattr(module, "lazy_load_kernel", lambda name: loaded)
    return module, calls


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Olmoe", "GraniteMoe", "DeepseekV3"])
def test_models_of_transformers(integration, name):
    from hf_models import close, small, step, with_backend

    model = small(name)
    got = step(with_backend(model, "sonicmoe"))
    assert len(integration[1]) == (1 if name == "DeepseekV3" else 2)
    close(got, step(with_backend(model, "eager")))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("concatenated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on("cpu", "cuda")
def test_experts_of_transformers(integration, device, dtype, concatenated, transposed):
    """Biases, both layouts, and ids of experts on other ranks: the call for any experts module."""
    gate_up = "concatenated" if concatenated else "interleaved"
    activation = sonicmoe.ActivationType.GEGLU
    case = Case("40,16,8,5,2", dtype, activation, bias=True, gate_up=gate_up, routing="dropped")
    given = make_inputs(case, device)

    def transformers_own(x, ids, scores, w1, w2, b1, b2):
        module = SimpleNamespace(
            has_gate=True,
            has_bias=True,
            has_post_expert_norm=False,
            is_transposed=transposed,
            is_concatenated=concatenated,
            num_experts=5,
            config=SimpleNamespace(hidden_act="gelu"),
            gate_up_proj=w1.mT if transposed else w1,
            down_proj=w2.mT if transposed else w2,
            gate_up_proj_bias=b1,
            down_proj_bias=b2,
        )
        return integration[0].sonicmoe_experts_forward(module, x, ids, scores)

    def written_out(x, ids, scores, **weights):
        return plain(case)(x, ids, scores.to(x.dtype), **weights)

    exact = run(written_out, given.double())
    compare(run(transformers_own, given), run(written_out, given), exact, dtype)
