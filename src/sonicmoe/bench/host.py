"""What a layer costs the host: a shape so small that the GPU does not matter."""

from collections.abc import Callable
from functools import partial

import torch

from .cases import HOST
from .inputs import make_inputs
from .subjects import ours
from .timing import host_ms, in_turns

STACK = 8
CALLING_THREAD = "calling_thread_"


def measure_host(device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Of a layer alone, with the router in and out, and of one in a stack as a model has it.

    Alone, the backward pass begins by waking up autograd's thread; a stack wakes it up once, and
    in the calling thread nothing has to wake up. All take turns: a virtual machine was 1.8 times
    slower in some minutes than in others.
    """
    inputs = make_inputs(HOST, device=device, dtype=dtype)
    timers = {}
    for prefix, router, layers in (
        ("", True, 1),
        ("no_router_", False, 1),
        ("stack_", True, STACK),
        (CALLING_THREAD, True, 1),
    ):
        subject = ours(inputs, router=router, layers=layers)
        for name, call in (("fwd", subject.forward), ("fwd_bwd", subject.forward_backward)):
            timers[f"{prefix}host_{name}_ms"] = partial(
                _ms_of_a_layer, call, device, layers, prefix != CALLING_THREAD
            )
    return in_turns(timers)


def _ms_of_a_layer(
    call: Callable[[], object], device: str, layers: int, autograds_thread: bool
) -> float:
    with torch.autograd.set_multithreading_enabled(autograds_thread):
        return host_ms(call, device, calls=80 // layers, queued=max(1, 10 // layers)) / layers
