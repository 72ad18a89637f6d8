"""Host time of a layer, on a shape so small that the GPU does not matter."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from sonicmoe.moe import MoE
from sonicmoe.tools.candidates import Candidate, ours
from sonicmoe.tools.cases import Case
from sonicmoe.tools.inputs import Inputs, make_inputs

from .timing import host_ms, interleaved, is_cuda

HOST = replace(Case.of_shape("64,128,64,8,2"), name="host")  # only host time matters
Call = Callable[[], object]
STACK = 8
CALLING_THREAD = "calling_thread_"
# Prefix of the fields in a record, and what was measured.
CANDIDATES = {
    "": "one layer",
    "stack_": f"one layer of a stack of {STACK}",
    CALLING_THREAD: "one layer, `torch.autograd.set_multithreading_enabled(False)`",
    "module_": "`MoE` with its auxiliary loss",
    "graph_": "`MoE` captured by `torch.cuda.make_graphed_callables`",
    "dense_": "a gated dense layer in PyTorch",
}


def measure_host(device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Host time per layer in ms, of one layer, of a stack of them, of `MoE`, and of a dense layer.

    For one layer alone, the backward pass first wakes up autograd's thread; a stack does so once,
    and with multithreading disabled there is no thread to wake up. All are interleaved: a virtual
    machine ran the same Python half as fast in some minutes.
    """
    inputs = make_inputs(HOST, device=device, dtype=dtype)
    candidates = [
        ("", _directions(ours(inputs, router=True)), 1),
        ("no_router_", _directions(ours(inputs, router=False)), 1),
        ("stack_", _directions(ours(inputs, router=True, layers=STACK)), STACK),
        (CALLING_THREAD, _directions(ours(inputs, router=True)), 1),
        ("module_", _module(inputs, captured=False), 1),
        ("dense_", _directions(_dense(inputs)), 1),
    ]
    if is_cuda(device):
        candidates.append(("graph_", _module(inputs, captured=True), 1))
    timers = {}
    for prefix, directions, layers in candidates:
        for name, call in directions.items():
            timers[f"{prefix}host_{name}_ms"] = partial(
                _ms_of_a_layer, call, device, layers, prefix != CALLING_THREAD
            )
    return interleaved(timers)


def _directions(candidate: Candidate) -> dict[str, Call]:
    return {"fwd": candidate.forward, "fwd_bwd": candidate.forward_backward}


def _module(inputs: Inputs, captured: bool) -> dict[str, Call]:
    """`MoE` with gradients for its output and its loss, or as two CUDA graphs of that."""
    p, x = inputs.case.problem, inputs.x
    moe = MoE(p.E, p.K, p.H, p.I).to(x.device, x.dtype)
    leaves = (x, *moe.parameters())
    upstream = (inputs.dout, torch.ones_like(moe(x)[1]))
    if captured:
        torch.cuda.make_graphed_callables(moe, (x,))  # replaces its forward

    def forward_backward() -> None:
        torch.autograd.grad(moe(x), leaves, upstream)

    return {"fwd": partial(moe, x), "fwd_bwd": forward_backward}


def _dense(inputs: Inputs) -> Candidate:
    """Two GEMMs with a gate in between, one autograd node per step."""
    p, x = inputs.case.problem, inputs.x
    w1, w2 = x.new_empty(2 * p.I, p.H).normal_(), x.new_empty(p.H, p.I).normal_()
    leaves = {"x": x, "w1": w1.requires_grad_(), "w2": w2.requires_grad_()}

    def forward() -> torch.Tensor:
        gate, up = F.linear(x, w1).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w2)

    return Candidate("dense", False, forward, leaves, inputs.dout)


def _ms_of_a_layer(call: Call, device: str, layers: int, autograds_thread: bool) -> float:
    with torch.autograd.set_multithreading_enabled(autograds_thread):
        return host_ms(call, device, calls=80 // layers, queued=max(1, 10 // layers)) / layers
