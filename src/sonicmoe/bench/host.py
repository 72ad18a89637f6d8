"""What a layer costs the host: a shape so small that the GPU does not matter."""

import torch

from .cases import HOST
from .inputs import make_inputs
from .subjects import ours
from .timing import host_ms

STACK = 8
CALLING_THREAD = "calling_thread_"


def measure_host(device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Of a layer alone, with the router in and out, and of one in a stack as a model has it.

    Alone, the backward pass begins by waking up autograd's thread; a stack wakes it up once, and
    in the calling thread nothing has to wake up.
    """
    inputs = make_inputs(HOST, device=device, dtype=dtype)
    figures = {}
    for prefix, router, layers in (
        ("", True, 1),
        ("no_router_", False, 1),
        ("stack_", True, STACK),
        (CALLING_THREAD, True, 1),
    ):
        subject = ours(inputs, router=router, layers=layers)
        for name, call in (("fwd", subject.forward), ("fwd_bwd", subject.forward_backward)):
            with torch.autograd.set_multithreading_enabled(prefix != CALLING_THREAD):
                ms = host_ms(call, device, calls=200 // layers, queued=max(1, 10 // layers))
            figures[f"{prefix}host_{name}_ms"] = ms / layers
    return figures
