"""Peaks of the cost model against the lifetimes of all buffers that launchers allocate."""

import importlib
import weakref

import pytest
import torch

pytest.importorskip("triton", reason="launchers need Triton, which is for Linux")

from sonicmoe import MemoryPolicy, experts, validation
from sonicmoe.launch import fp8_wgrad, grouped_gemm, memory
from sonicmoe.launch.spans import Spans
from sonicmoe.layer.memory import Z_POLICIES
from sonicmoe.shapes import Problem
from sonicmoe.tools import cost
from sonicmoe.tuning import Target

MODULES = ("grouped_gemm", "fp8", "fp8_dz", "fp8_scales", "fp8_wgrad", "quantize", "routing")
MIB = 2**20


class Live:
    """Bytes of the buffers that are alive, and the most so far."""

    def __init__(self):
        self.now = self.most = 0

    def watched(self, allocate):
        def empty(*args):
            t = allocate(*args)
            self.now += t.nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(t.untyped_storage(), self._freed, t.nbytes)
            return t

        return empty

    def _freed(self, size):
        self.now -= size


@pytest.fixture
def live(monkeypatch):
    """Launchers for an H200 that start nothing."""
    found = Live()
    for name in MODULES:
        module = importlib.import_module(f"sonicmoe.launch.{name}")
        monkeypatch.setattr(module, "launch", lambda *args, **options: None)
        if hasattr(module, "target_of"):
            monkeypatch.setattr(module, "target_of", lambda t: Target(90, 132))
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(memory, name, found.watched(getattr(memory, name)))
    # The cost model leaves out the partial sums of weight gradients, at most 69 MB on an H200.
    for module in (grouped_gemm, fp8_wgrad):
        monkeypatch.setattr(module, "spans_of", lambda *args: Spans())
    monkeypatch.setattr(validation, "_interpreting", lambda: True)
    monkeypatch.setattr("sonicmoe.ops.fp8.fp8_backend", lambda backend, x: backend)
    return found


@pytest.mark.parametrize("precision", [None, "fp8", "fp8_bf16_dw"])
@pytest.mark.parametrize(
    "policy",
    [
        *map(MemoryPolicy, Z_POLICIES),
        MemoryPolicy("recompute", 4),
        MemoryPolicy(weights="recompute"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "shape",
    ["32768,4096,256,256,16", "32768,2048,1024,64,8", "32768,2048,512,512,10"],
    ids=["rows of dX are the peak", "dZ is", "dW1 is"],
)
def test_peaks(live, shape, precision, policy):
    p = Problem.parse(shape)

    def new(*sizes, dtype=torch.bfloat16):
        return torch.empty(sizes, dtype=dtype, requires_grad=dtype.is_floating_point)

    x, w1, w2 = new(p.T, p.H), new(p.E, p.N, p.H), new(p.E, p.H, p.I)
    ids, scores = new(p.T, p.K, dtype=torch.int32), new(p.T, p.K, dtype=torch.float32)
    options = {"precision": precision, "memory": policy, "backend": "triton"}
    out = experts(x, ids, scores, w1, w2, **options)
    peak = cost.peak_bytes(p, router=None, memory=policy, precision=precision)
    forward, live.most = live.most, live.now
    out.backward(torch.empty_like(out))
    expected = peak.forward - scores.nbytes
    assert expected <= forward <= expected + MIB / 2
    expected = peak.backward - scores.nbytes
    assert expected <= live.most <= expected + MIB / 8
