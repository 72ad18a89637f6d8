"""What a layer costs the host: a shape so small that the GPU does not matter."""

import torch

from .cases import HOST
from .inputs import make_inputs
from .subjects import ours
from .timing import host_ms


def measure_host(device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    inputs = make_inputs(HOST, device=device, dtype=dtype)
    figures = {}
    for router in (True, False):
        subject = ours(inputs, router=router)
        prefix = "" if router else "no_router_"
        figures[f"{prefix}host_fwd_ms"] = host_ms(subject.forward, device)
        figures[f"{prefix}host_fwd_bwd_ms"] = host_ms(subject.forward_backward, device)
    return figures
