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
from packed_weights import random_packed
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime import build

import sonicmoe
from sonicmoe import ActivationType, KernelBackendMoE, MoE, validation
from sonicmoe.errors import say_once
from sonicmoe.launch import launcher, triton_locks
from sonicmoe.launch.launcher import launch
from sonicmoe.layer import precompile, prepare
from sonicmoe.layer.lora import LowRank
from sonicmoe.layer.meta import Slots, meta_steps
from sonicmoe.layer.options import Options
from sonicmoe.layer.precompile import compile_together
from sonicmoe.layer.weights import ExpertWeights, Projection
from sonicmoe.routing import TokenRounding
from sonicmoe.shapes import Problem
from sonicmoe.tools.warmup import example_of_sizes, run_layer

H, I, E, K = 64, 32, 48, 2


@pytest.fixture(autouse=True)
def _kernels_on_cpu_tensors(monkeypatch):
    monkeypatch.setattr(validation, "_interpreting", lambda: True)
    monkeypatch.setattr("sonicmoe.ops.fp8.fp8_backend", lambda backend, x: backend)


def example(router="softmax_over_topk", dtype=torch.bfloat16, logits=None, **given):
    """What `warmup` compiles for."""
    layout = {name: given.pop(name) for name in LAYOUT if name in given}
    found = example_of_sizes(H, I, E, K, dtype, Options.of(given), **layout)
    if router == "token_rounding" and logits is not None:
        ids, scores = (t.flatten() for t in found.slots[:2])
        found = found._replace(slots=Slots(ids, scores, ids, ids))
    return found._replace(logits=logits)


def step(router="softmax_over_topk", activation=ActivationType.SWIGLU, **given):
    """The kernels of training steps through `MoE`, one short and one long.

    A short one permutes its slots in one launch and has no expert whose sums could be split.
    """
    layout = {name: given.pop(name) for name in LAYOUT if name in given}
    return [
        kernel
        for tokens in (40, 999)
        for kernel in _step(tokens, MoE(E, K, H, I, activation, router=router, **given), **layout)
    ]


def _step(tokens, moe, weights=None, bias=False, main_grad=False, transposed=False):
    moe.bfloat16()
    for experts in (moe.c_fc, moe.c_proj):
        if bias:
            experts.bias = torch.nn.Parameter(experts.weight.new_zeros(experts.weight.shape[:2]))
        if transposed:
            experts.weight = torch.nn.Parameter(experts.weight.data.mT.contiguous().mT)
        if weights is not None:
            moe.to(weights)
        if main_grad:
            experts.weight.main_grad = torch.zeros_like(experts.weight, dtype=torch.float32)
    x = torch.zeros(tokens, H, dtype=torch.bfloat16, requires_grad=True)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=weights is not None)
    with naming(90) as needed, autocast:
        out, aux_loss = moe(x, KernelBackendMoE.sonicmoe)
        torch.autograd.backward((out, aux_loss), (torch.ones_like(out), torch.ones_like(aux_loss)))
    return needed


LAYOUT = ("weights", "bias", "main_grad", "transposed")
LAYERS = {
    "plain": {},
    "bias": {"bias": True, "router": "topk_over_softmax"},
    "concatenated": {"gate_up": "concatenated", "router": "topk_over_softmax_normalized"},
    "transposed": {"transposed": True},
    "main_grad": {"main_grad": True},
    "autocast": {"weights": torch.float32},
    "sigmoid": {"router": "sigmoid"},
    "rounding": {"router": "token_rounding"},
    "rounding object": {"router": TokenRounding(E, K, subroutine="up")},
    "fp8": {"precision": "fp8"},
    "fp8, main_grad": {"main_grad": True, "weights": torch.float32, "precision": "fp8"},
    "relu": {"activation": ActivationType.RELU_SQ},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_after_warmup_compiles_nothing(name):
    layer = LAYERS[name]
    with naming(90) as warm:
        run_layer(example(**layer), layer.get("router", "softmax_over_topk"))
    needed = step(**layer)
    missing = {k.metadata.name for k in needed if all(k is not w for w in warm)}
    assert len(needed) >= 15
    assert not missing


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("router", ["softmax_over_topk", "token_rounding"])
def test_a_first_step_precompiles_what_its_experts_and_loss_need(router, precision):
    layer = {"router": router, "precision": precision}
    with naming(90) as early:
        meta_steps(example(**layer, logits=torch.bfloat16))
    routing = ("topk", "keys", "select", "emit", "logits_gradient")
    missing = {
        k.metadata.name for k in step(**layer)
        if all(k is not a for a in early) and not k.metadata.name.startswith(routing)
    }  # fmt: skip
    assert not missing


@pytest.mark.parametrize("entry", ["experts", "grouped_experts", "lora", "packed"])
def test_what_a_step_precompiles(entry, monkeypatch):
    """The arguments of the call, also sorted rows and adapters, and nothing is kept after it."""
    examples, steps = [], []
    monkeypatch.setattr(
        "sonicmoe.layer.prepare.Step", lambda e: examples.append(e) or precompile.Step(e)
    )
    learned = {"dtype": torch.bfloat16, "requires_grad": entry in ("experts", "grouped_experts")}
    w1, w2 = torch.zeros(E, 2 * I, H, **learned), torch.zeros(E, H, I, **learned)
    if entry == "packed":
        w1, w2 = random_packed("mxfp4", (E, 2 * I, H)), random_packed("mxfp4", (E, H, I))
    x = torch.zeros(2 * E, H, dtype=torch.bfloat16, requires_grad=True)
    given = {"backend": "triton"}
    if entry == "lora":
        a, b = x.new_zeros(8 * E, H), x.new_zeros(2 * I, 8 * E)
        given["lora1"] = LowRank(a.requires_grad_(), b.requires_grad_())
    with naming(90) as needed:
        if entry == "grouped_experts":
            out = sonicmoe.grouped_experts(x, torch.full((E,), 2), w1, w2, **given)
        else:
            ids = torch.zeros(2 * E, K, dtype=torch.int32)
            out = sonicmoe.experts(x, ids, torch.zeros(2 * E, K), w1, w2, **given)
        steps.append(launcher.thread_state.step())
        out.backward(torch.ones_like(out))
    with naming(90) as early:
        meta_steps(*examples)
    assert not {k.metadata.name for k in needed if all(k is not a for a in early)}
    assert len(needed) >= 5 and steps == [None]


def test_kernels_are_compiled_side_by_side(monkeypatch):
    """All of them, loaded and found by the step that follows."""
    step = example(dtype=torch.float16)
    loaded, said = [], []
    monkeypatch.setattr(precompile, "_load", lambda kernel, index: loaded.append(kernel))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    with compiling(90) as kernels:
        compile_together(lambda: meta_steps(step), 0, lambda *of: said.append(of))
    new = {k.result() for k in kernels if hasattr(k, "result")}  # others were there before
    assert new == set(loaded) and len(new) == len(loaded) >= 8
    assert [number for number, *_ in said] == list(range(1, len(loaded) + 1))
    with compiling(90) as again:
        meta_steps(step)
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
        compile_together(lambda: meta_steps(example(dtype=torch.float16)), 0)
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
    say_once.cache_clear()
    with pytest.warns(UserWarning, match="one by one.*RuntimeError: no compiler"):
        precompile.Step(example()).precompile(0)


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
import sys, torch
from sonicmoe.launch import grouped_gemm, launcher
from sonicmoe.launch import routing as launch_routing
from sonicmoe.layer.meta import Slots, meta_steps
from sonicmoe.layer.options import Options
from sonicmoe.tools.warmup import example_of_sizes

for module in (launcher, grouped_gemm, launch_routing):
    module.launch = lambda *_, **__: None
grouped_gemm.target_of = lambda t: launcher.Target(80, 108)
assert "sympy" not in sys.modules
example = example_of_sizes(64, 32, 4, 2, torch.bfloat16, Options(), main_grad=True)
meta_steps(example._replace(logits=torch.float32))
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_a_training_step_is_precompiled():
    """Where gradients are off, half of it never runs; what is compiled or fake has no kernels."""
    x, w1, w2 = (torch.zeros(shape) for shape in ((32, H), (E, 2 * I, H), (E, H, I)))
    weights = ExpertWeights(Projection(w1), Projection(w2))
    ids, scores = torch.zeros(32, K, dtype=torch.int32), torch.zeros(32, K)
    with naming(90):
        assert prepare.routed(x, ids, scores, weights, Options(backend="triton")).step is not None
        with torch.no_grad():
            assert prepare.routed(x, ids, scores, weights, Options(backend="triton")).step is None
    assert prepare.routed(x, ids, scores, weights, Options()).step is None
