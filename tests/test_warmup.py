"""What `warmup` compiles is what a training step runs."""

import ast
import contextlib
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from machine_code import compiling, naming
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime import build

import sonicmoe
from sonicmoe import ActivationType, KernelBackendMoE, MoE, validation
from sonicmoe.launch import triton_locks
from sonicmoe.launch.launcher import launch
from sonicmoe.layer import precompile
from sonicmoe.layer.precompile import Layer, compile_together, run_step
from sonicmoe.layer.weights import ExpertWeights, Projection
from sonicmoe.routing import TokenRounding
from sonicmoe.shapes import Problem
from sonicmoe.tools.warmup import run_layer

H, I, E, K = 64, 32, 48, 2


@pytest.fixture(autouse=True)
def _kernels_on_cpu_tensors(monkeypatch):
    monkeypatch.setattr(validation, "_interpreting", lambda: True)
    monkeypatch.setattr("sonicmoe.layer.fp8.fp8_backend", lambda backend, x: backend)


def step(layer, router):
    """The kernels of training steps through `MoE`, one short and one long.

    A short one permutes its slots in one launch and has no expert whose sums could be split.
    """
    return [kernel for tokens in (40, 999) for kernel in _step(layer, router, tokens)]


def _step(layer, router, tokens):
    moe = MoE(
        E,
        K,
        H,
        I,
        layer.activation,
        any(layer.bias),
        router=router,
        gate_up=layer.gate_up,
        precision=layer.precision,
    ).bfloat16()
    for experts, transposed, main_grad in zip(
        (moe.c_fc, moe.c_proj), layer.transposed, layer.main_grad, strict=True
    ):
        if transposed:
            experts.weight = torch.nn.Parameter(experts.weight.data.mT.contiguous().mT)
        if main_grad:
            experts.weight.main_grad = torch.zeros_like(experts.weight, dtype=torch.float32)
    autocast = layer.weights is not None
    if autocast:
        moe.to(layer.weights)
    x = torch.zeros(tokens, H, dtype=torch.bfloat16, requires_grad=True)
    with naming(90) as needed, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, aux_loss = moe(x, KernelBackendMoE.sonicmoe)
        torch.autograd.backward((out, aux_loss), (torch.ones_like(out), torch.ones_like(aux_loss)))
    return needed


LAYERS = {
    "plain": (Layer(H, I, E, K), "softmax_over_topk"),
    "bias": (Layer(H, I, E, K, bias=(True, True)), "topk_over_softmax"),
    "concatenated": (Layer(H, I, E, K, gate_up="concatenated"), "topk_over_softmax_normalized"),
    "transposed": (Layer(H, I, E, K, transposed=(True, True)), "softmax_over_topk"),
    "main_grad": (Layer(H, I, E, K, main_grad=(True, True)), "softmax_over_topk"),
    "autocast": (Layer(H, I, E, K, weights=torch.float32), "softmax_over_topk"),
    "sigmoid": (Layer(H, I, E, K), "sigmoid"),
    "rounding": (Layer(H, I, E, K), "token_rounding"),
    "rounding object": (Layer(H, I, E, K), TokenRounding(E, K, subroutine="up")),
    "fp8": (Layer(H, I, E, K, precision="fp8"), "softmax_over_topk"),
    "fp8, main_grad": (
        Layer(H, I, E, K, main_grad=(True, True), weights=torch.float32, precision="fp8"),
        "softmax_over_topk",
    ),
    "relu": (Layer(H, I, E, K, activation=ActivationType.RELU_SQ), "softmax_over_topk"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_after_warmup_compiles_nothing(name):
    layer, router = LAYERS[name]
    with naming(90) as warm:
        run_layer(layer, router)
    needed = step(layer, router)
    missing = {k.metadata.name for k in needed if all(k is not w for w in warm)}
    assert len(needed) >= 15
    assert not missing


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("router", ["softmax_over_topk", "token_rounding"])
def test_a_first_step_precompiles_what_its_experts_and_loss_need(router, precision):
    k = K if router == "softmax_over_topk" else 0
    layer = Layer(H, I, E, k, logits=torch.bfloat16, precision=precision)
    with naming(90) as early:
        run_step(layer)
    needed = step(layer, router)
    routing = ("topk", "keys", "select", "emit", "logits_gradient")
    missing = {
        k.metadata.name for k in needed
        if all(k is not a for a in early) and not k.metadata.name.startswith(routing)
    }  # fmt: skip
    assert not missing


def test_kernels_are_compiled_side_by_side(monkeypatch):
    """All of them, loaded and found by the step that follows."""
    layer = Layer(H, I, E, K, torch.float16)
    loaded, said = [], []
    monkeypatch.setattr(precompile, "_load", lambda kernel, index: loaded.append(kernel))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    with compiling(90) as kernels:
        compile_together(lambda: run_step(layer), 0, lambda *of: said.append(of))
    new = {k.result() for k in kernels if hasattr(k, "result")}  # others were there before
    assert new == set(loaded) and len(new) == len(loaded) >= 8
    assert [number for number, *_ in said] == list(range(1, len(loaded) + 1))
    with compiling(90) as again:
        run_step(layer)
    assert set(again) == {k.result() if hasattr(k, "result") else k for k in kernels}


def test_sources_are_parsed_one_at_a_time(monkeypatch, tmp_path):
    """Python 3.11's parser mixes up threads that use it at once."""
    parse, inside, most = ast.parse, [], []

    def slowly(*args, **kwargs):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return parse(*args, **kwargs)

    monkeypatch.setattr(precompile, "_load", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(precompile, "_threads", lambda: 4)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # nothing is there to be found
    kernel, meta = triton.JITFunction(_small_kernel), torch.empty(1, device="meta")

    def run():
        for value in range(4):
            launch(kernel, (1,), meta, VALUE=value)

    with compiling(90):
        monkeypatch.setattr(ast, "parse", slowly)
        compile_together(run, 0)
    assert len(most) >= 4 and max(most) == 1


def test_the_callers_modes_see_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(precompile, "_load", lambda *_: None)
    saved = []
    with (
        compiling(90),
        FlopCounterMode(display=False) as flops,
        torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t),
        torch.no_grad(),
    ):
        compile_together(lambda: run_step(Layer(H, I, E, K, torch.float16)), 0)
    assert flops.get_total_flops() == 0 and not saved


def test_a_kernel_that_does_not_compile(monkeypatch):
    """Its error is raised, and the next compilation is none the worse for it."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(precompile, "_load", lambda *_: None)
    broken, small = triton.JITFunction(_broken_kernel), triton.JITFunction(_small_kernel)
    meta = torch.empty(1, device="meta")
    with compiling(90) as compiled:
        with pytest.raises(triton.CompilationError):
            compile_together(lambda: launch(broken, (1,), meta), 0)
        compile_together(lambda: launch(small, (1,), meta, VALUE=4), 0)
    assert compiled[-1].result().metadata.name == "_small_kernel"


def test_python_is_left_as_it_was(monkeypatch):
    """By two threads that compile at once, one of them in vain."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    before, seen = sys.getswitchinterval(), []

    def run():
        seen.append(sys.getswitchinterval())
        time.sleep(0.05)
        if len(seen) == 1:
            raise RuntimeError

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(compile_together, run, 0) for _ in range(2)]
    assert sorted(r.exception() is None for r in runs) == [False, True]
    assert sys.getswitchinterval() == before < min(seen)


def test_a_step_does_not_depend_on_what_was_precompiled(monkeypatch):
    def fail(run, index):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(precompile, "compile_together", fail)
    once = precompile._precompile_once
    once.cache_clear()
    with pytest.warns(UserWarning, match="one by one.*RuntimeError: no compiler"):
        once(0, Layer(H, I, E, K))
    once.cache_clear()


def _small_kernel(x, VALUE: tl.constexpr):
    tl.store(x, VALUE)


def _broken_kernel(x):
    tl.store(x, tl.arange(0, 3))


def test_warmup_needs_a_gpu():
    with pytest.raises(ValueError, match="device: expected a GPU, got cpu"):
        sonicmoe.warmup(H, I, E, K, device="cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", torch.device("cuda")])
def test_warmup_without_a_gpu_is_a_clear_error(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device: expected a GPU of this machine, got cuda.* 0 G"):
        sonicmoe.warmup(H, I, E, K, device=device)


@pytest.mark.parametrize("device", ["gpu", 1.5, None])
def test_warmup_for_something_that_is_not_a_device(device):
    with pytest.raises(ValueError, match="device: expected a GPU, got "):
        sonicmoe.warmup(H, I, E, K, device=device)


@pytest.mark.parametrize("value", [0, -8, True, 64.0, math.nan, "64", None, [64]], ids=repr)
@pytest.mark.parametrize(
    "argument", ["hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok"]
)
def test_warmup_takes_positive_integers(argument, value):
    sizes = {
        "hidden_size": H, "intermediate_size": I, "num_experts": E, "num_experts_per_tok": K
    }  # fmt: skip
    with pytest.raises(ValueError, match=rf"^{argument}: expected an integer of at least 1, got"):
        sonicmoe.warmup(**sizes | {argument: value})


@pytest.mark.parametrize("value", [-1, True, 64.0, "64", None], ids=repr)
@pytest.mark.parametrize("argument", ["T", "H", "I", "E", "K"])
def test_a_problem_takes_positive_integers(argument, value):
    sizes = {"T": 6, "H": 16, "I": 8, "E": 4, "K": 2}
    with pytest.raises(ValueError, match=rf"^{argument}: expected an integer of at least [01], go"):
        Problem(**sizes | {argument: value})


def test_only_the_number_of_tokens_may_be_zero():
    assert Problem.parse("0,16,8,4,2") == Problem(0, 16, 8, 4, 2)
    for text in ("6,0,8,4,2", "6,16,0,4,2", "6,16,8,0,2", "6,16,8,4,0"):
        with pytest.raises(ValueError, match=r"^[HIEK]: expected an integer of at least 1, got 0"):
            Problem.parse(text)


@pytest.mark.parametrize("text", ["", "6,16,8,4", "6,16,8,4,²", "6,16,8,4,-2", "6,16,8,4,2.0", 6])
def test_a_shape_is_five_integers(text):
    with pytest.raises(ValueError, match=r"^shape: expected five integers"):
        Problem.parse(text)


def test_launchers_are_loaded_one_at_a_time():
    """All of them are one module, whose function is that of the last one loaded."""
    module = ModuleType("launcher")

    def load(name, launch):
        module.launch = launch
        time.sleep(0.01)
        return module

    load = triton_locks.loaded_alone(load)
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(load, ["launcher"] * 8, range(8)))
    assert [m.launch for m in loaded] == list(range(8))
    assert build._load_module_from_path.__code__ is load.__code__


def test_precompiling_imports_nothing():
    """`backward()` and `empty_like` on the meta device would: sympy, which takes seconds."""
    code = """
import sys
from sonicmoe.layer import precompile
from sonicmoe.launch import grouped_gemm, launcher
from sonicmoe.launch import routing as launch_routing

for module in (launcher, grouped_gemm, launch_routing):
    module.launch = lambda *_, **__: None
grouped_gemm.target_of = lambda t: launcher.Target(80, 108)
assert "sympy" not in sys.modules
precompile.run_step(precompile.Layer(64, 32, 4, 2, logits=precompile.torch.float32))
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_a_real_training_step_is_precompiled(monkeypatch):
    """The GPU of fake tensors need not exist; where gradients are off, half of it never runs."""
    asked = []
    monkeypatch.setattr(precompile, "_precompile_once", lambda _, layer: asked.append(layer))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def step(learn: bool) -> None:
        x, w1, w2 = (torch.empty(shape) for shape in ((32, H), (E, 2 * I, H), (E, H, I)))
        ids = torch.empty((32, K), dtype=torch.int32)
        kind = (ActivationType.SWIGLU, "interleaved")
        weights = ExpertWeights(Projection(w1.requires_grad_(learn)), Projection(w2), *kind)
        precompile.precompile_step(x, ids, weights, "triton", torch.float32)

    with FakeTensorMode():
        step(True)
    step(False)
    with torch.no_grad():
        step(True)
    assert not asked
    step(True)
    assert asked == [Layer(H, I, E, K, torch.float32, logits=torch.float32)]
