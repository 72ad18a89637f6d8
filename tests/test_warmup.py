"""What `warmup` compiles is what a training step runs."""

import contextlib
import sys

import pytest
import torch
import triton
import triton.language as tl
from machine_code import compiling

import sonicmoe
from sonicmoe import validation
from sonicmoe.ops.launch import launch
from sonicmoe.warmup import Layer, compile_together, run_experts, run_router

warmup = sys.modules["sonicmoe.warmup"]  # the name of the package is the function
H, I, E, K = 64, 32, 48, 2


@pytest.fixture(autouse=True)
def _kernels_on_cpu_tensors(monkeypatch):
    monkeypatch.setattr(validation, "_interpreting", lambda: True)


def step(tokens, bias, gate_up, transposed):
    """The kernels of a forward and backward pass, through the public functions."""

    def new(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    x, logits = new(tokens, H), new(tokens, E)
    w1, w2 = (
        (new(E, H, 2 * I).mT, new(E, I, H).mT) if transposed else (new(E, 2 * I, H), new(E, H, I))
    )
    b1, b2 = (new(E, 2 * I), new(E, H)) if bias else (None, None)
    with compiling(90) as compiled:
        scores, _ = sonicmoe.topk_scores(logits, K, backend="triton")
        ids = torch.zeros(tokens, K, dtype=torch.int32)
        out = sonicmoe.experts(
            x, ids, scores, w1, w2, b1, b2, gate_up=gate_up, backend="triton"
        )  # fmt: skip
        out.backward(torch.ones_like(out))
    return compiled


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_step_after_warmup_compiles_nothing(bias, gate_up, transposed):
    layer = Layer(
        H, I, E, K, concatenated=gate_up == "concatenated", bias=bias, transposed=(transposed,) * 2
    )
    with compiling(90) as warm:
        run_router(layer, softmax_over_topk=True)
        run_experts(layer, training=True)
    needed = step(999, bias, gate_up, transposed)
    missing = {k.metadata.name for k in needed if all(k is not w for w in warm)}
    assert len(needed) >= 15
    assert not missing


def test_kernels_are_compiled_side_by_side(monkeypatch):
    """All of them, loaded and found by the step that follows."""
    layer = Layer(H, I, E, K, torch.float16)
    loaded, said = [], []
    monkeypatch.setattr(warmup, "_load", lambda index, kernel: loaded.append(kernel))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    with compiling(90) as kernels:
        compile_together(lambda: run_experts(layer, training=True), 0, lambda *of: said.append(of))
    new = {k.result() for k in kernels if hasattr(k, "result")}  # others were there before
    assert new == set(loaded) and len(new) == len(loaded) >= 8
    assert [number for number, *_ in said] == list(range(1, len(loaded) + 1))
    with compiling(90) as again:
        run_experts(layer, training=True)
    assert set(again) == {k.result() if hasattr(k, "result") else k for k in kernels}


def test_a_kernel_that_does_not_compile(monkeypatch):
    """Its error is raised, and the next compilation is none the worse for it."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(warmup, "_load", lambda index, kernel: None)
    broken = triton.JITFunction(_broken_kernel)
    meta = torch.empty(1, device="meta")
    with compiling(90):
        with pytest.raises(triton.CompilationError):
            compile_together(lambda: launch(broken, (1,), meta), 0)
        compile_together(lambda: run_router(Layer(H, I, 8, 1), True), 0)


def _broken_kernel(x):
    tl.store(x, tl.arange(0, 3))


def test_warmup_needs_a_gpu():
    with pytest.raises(ValueError, match="device: expected a GPU, got cpu"):
        sonicmoe.warmup(H, I, E, K, device="cpu")
