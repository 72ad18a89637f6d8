"""Registration of operators: schema, implementation, shapes without data, FLOPs.

The operators are functional and know no autograd: `autograd.py` stands outside of them. That costs
11 µs a call where `torch.library.custom_op` with `register_autograd` costs 26 to 36.
"""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import register_flop_formula

_library = torch.library.Library("sonicmoe", "DEF")


def operator(
    schema: str, fake: Callable, flops: Callable[..., int] | None = None
) -> Callable[[Callable], Callable]:
    """Register the decorated function as `torch.ops.sonicmoe.<name>` and return the overload."""

    def register(function: Callable) -> Callable:
        name = schema.split("(")[0]
        _library.define(schema, tags=(torch.Tag.needs_exact_strides,))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sonicmoe::{name}", fake, lib=_library)
        packet = getattr(torch.ops.sonicmoe, name)
        if flops is not None:
            register_flop_formula(packet)(flops)
        return packet.default

    return register
