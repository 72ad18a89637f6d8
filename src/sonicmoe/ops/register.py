"""Registration of operators: schema, implementation, fake version (output shapes), FLOPs.

Operators are functional and have no autograd of their own: `autograd.py` calls them. A call
through the dispatcher takes 11 µs; `torch.library.custom_op` with `register_autograd` takes 26 to
36. Where no dispatch mode is active, the Python function is called directly.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch.utils.flop_counter import register_flop_formula

from .layout import dense_arguments

_library = torch.library.Library("sonicmoe", "DEF")
_PLAIN = frozenset(
    (torch.Tensor, torch.nn.Parameter, int, float, bool, str, torch.dtype, type(None))
)


def _with_every_result(function: Callable) -> Callable:
    """Replace None, a result that was not requested, by the empty tensor the dispatcher needs."""

    @wraps(function)
    def call(*args):
        found = function(*args)
        if type(found) is not tuple:
            return found
        return tuple([args[0].new_empty(0) if t is None else t for t in found])

    return call


def operator(
    schema: str, fake: Callable, flops: Callable[..., int] | None = None
) -> Callable[[Callable], Callable]:
    """Register the decorated function as `torch.ops.sonicmoe.<name>`; returns its caller."""

    def register(function: Callable) -> Callable:
        name = schema.split("(")[0]
        _library.define(schema, tags=(torch.Tag.needs_exact_strides,))
        packet = getattr(torch.ops.sonicmoe, name)
        overload = packet.default
        launches = overload._schema.arguments[-1].name == "backend"
        fast, shapes = function, fake
        if launches:
            for_kernels, for_fakes = dense_arguments(overload._schema)
            fast = for_kernels(function)
            shapes = for_fakes(fake)
        _library.impl(name, _with_every_result(fast), "CompositeExplicitAutograd")
        torch.library.register_fake(f"sonicmoe::{name}", _with_every_result(shapes), lib=_library)
        if flops is not None:
            register_flop_formula(packet)(flops)

        @wraps(function)
        def call(*args):
            dispatch = (
                torch.compiler.is_compiling()
                or torch._C._len_torch_dispatch_stack() > 0  # FLOPs, checkpoint policies, fakes
                or torch._C._are_functorch_transforms_active()
                or torch.autograd._profiler_enabled()
                or not _PLAIN.issuperset(map(type, args))
            )
            return overload(*args) if dispatch else fast(*args)

        return call

    return register
