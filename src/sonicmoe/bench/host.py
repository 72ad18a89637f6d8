"""What a layer costs the host: a shape so small that the GPU does not matter."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ..moe import MoE
from .cases import HOST
from .inputs import Inputs, make_inputs
from .subjects import Subject, ours
from .timing import host_ms, in_turns, is_cuda

STACK = 8
CALLING_THREAD = "calling_thread_"
# What begins the name of a figure, and what it is of.
SUBJECTS = {
    "": "a layer alone",
    "stack_": f"a layer in a stack ({STACK} of them)",
    CALLING_THREAD: "alone under `torch.autograd.set_multithreading_enabled(False)`",
    "module_": "`MoE` with its auxiliary loss",
    "graph_": "captured by `torch.cuda.make_graphed_callables`",
    "dense_": "a gated dense layer of PyTorch's",
}


def measure_host(device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Of a layer alone, with the router in and out, and of one in a stack as a model has it.

    Alone, the backward pass begins by waking up autograd's thread; a stack wakes it up once, and
    in the calling thread nothing has to wake up. Also of `MoE` with its auxiliary loss and, on a
    GPU, captured; of a dense layer, as a yardstick. All take turns: a virtual machine ran the same
    Python half as fast in some minutes as in others.
    """
    inputs = make_inputs(HOST, device=device, dtype=dtype)
    subjects = [
        ("", ours(inputs, router=True), 1),
        ("no_router_", ours(inputs, router=False), 1),
        ("stack_", ours(inputs, router=True, layers=STACK), STACK),
        (CALLING_THREAD, ours(inputs, router=True), 1),
        ("module_", _module(inputs), 1),
        ("dense_", _dense(inputs), 1),
    ]
    if is_cuda(device):
        subjects.append(("graph_", _captured(inputs), 1))
    timers = {}
    for prefix, subject, layers in subjects:
        for name, call in (("fwd", subject.forward), ("fwd_bwd", subject.forward_backward)):
            timers[f"{prefix}host_{name}_ms"] = partial(
                _ms_of_a_layer, call, device, layers, prefix != CALLING_THREAD
            )
    return in_turns(timers)


def _module(inputs: Inputs) -> Subject:
    """`MoE`, whose loss is added to its output, so that one gradient reaches both."""
    moe, leaves = _moe(inputs)

    def forward() -> torch.Tensor:
        out, aux_loss = moe(inputs.x)
        return out + aux_loss.to(out.dtype)

    return Subject("module", True, forward, leaves, inputs.dout)


def _captured(inputs: Inputs) -> Subject:
    """`MoE` as two CUDA graphs, one for each direction."""
    moe, leaves = _moe(inputs)
    torch.cuda.make_graphed_callables(moe, (inputs.x,))  # replaces its forward
    return Subject("captured", True, lambda: moe(inputs.x)[0], leaves, inputs.dout)


def _dense(inputs: Inputs) -> Subject:
    """Two products and a gate between them, one node of autograd's for each step."""
    p, x = inputs.case.problem, inputs.x
    w1, w2 = x.new_empty(2 * p.I, p.H).normal_(), x.new_empty(p.H, p.I).normal_()
    leaves = {"x": x, "w1": w1.requires_grad_(), "w2": w2.requires_grad_()}

    def forward() -> torch.Tensor:
        gate, up = F.linear(x, w1).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w2)

    return Subject("dense", False, forward, leaves, inputs.dout)


def _moe(inputs: Inputs) -> tuple[MoE, dict[str, torch.Tensor]]:
    """And what its gradients are asked for."""
    p, x = inputs.case.problem, inputs.x
    moe = MoE(p.E, p.K, p.H, p.I).to(x.device, x.dtype)
    return moe, {"x": x, **dict(moe.named_parameters())}


def _ms_of_a_layer(
    call: Callable[[], object], device: str, layers: int, autograds_thread: bool
) -> float:
    with torch.autograd.set_multithreading_enabled(autograds_thread):
        return host_ms(call, device, calls=80 // layers, queued=max(1, 10 // layers)) / layers
