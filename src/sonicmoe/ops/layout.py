"""How tensors reach kernels: the one place that makes them dense.

A kernel computes addresses from shapes. It reads by strides only the weights, dense in either order
of their last two dimensions, and the rows of logits. Every other tensor argument of an operator is
made contiguous here. What TMA reads must also start on 16 bytes.
"""

from collections.abc import Callable
from functools import wraps

import torch

from ..errors import bad_argument
from ..notices import say_once

_WEIGHTS = frozenset(("w", "w1", "w2", "factor"))
_TMA = _WEIGHTS | {"x", "a", "z", "dz", "dout", "u"}
_BY_STRIDES = frozenset(("logits",))  # launchers copy them where columns are not adjacent


def dense_arguments(schema: torch.FunctionSchema) -> tuple[Callable, Callable]:
    """Two decorators, for an operator and for its fake version: tensor arguments become dense."""
    tensors = [
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type) and argument.name not in _BY_STRIDES | {"main_grad"}
    ]
    adds = schema.arguments[0].name == "main_grad"
    weights = [i for i, name in tensors if name in _WEIGHTS]
    plain = [i for i, name in tensors if name not in _TMA]
    rows = [i for i, name in tensors if name in _TMA - _WEIGHTS]

    def for_kernels(function: Callable) -> Callable:
        @wraps(function)
        def call(*given):
            args = list(given)
            if adds:
                _check_main_grad(args[0])
            for i in plain:
                t = args[i]
                if t is not None and not t.is_contiguous():
                    args[i] = t.contiguous()
            for i in rows:
                args[i] = args[i].contiguous()
            for i in weights:
                args[i] = dense_weight(args[i])
            if args[-1] == "triton":
                for i in rows:
                    args[i] = _for_tma(args[i])
                for i in weights:
                    w = args[i]
                    args[i] = _for_tma(w) if w.stride(2) == 1 else _for_tma(w.mT).mT
            return function(*args)

        return call

    def for_fakes(fake: Callable) -> Callable:
        @wraps(fake)
        def call(*given):
            args = list(given)
            for i in plain + rows:
                args[i] = None if args[i] is None else args[i].contiguous()
            for i in weights:
                args[i] = dense_weight(args[i])
            return fake(*args)

        return call

    return for_kernels, for_fakes


def dense_weight(w: torch.Tensor) -> torch.Tensor:
    """Weights that lie in memory as (E, N, K) or (E, K, N) pass as they are; others are copied."""
    if w.is_contiguous() or w.mT.is_contiguous():
        return w
    if not torch.compiler.is_compiling():
        say_once(
            f"weights of shape {tuple(w.shape)}, strides {w.stride()}, are copied at every call"
        )
    return w.contiguous()


def _check_main_grad(main_grad: torch.Tensor) -> None:
    """It is added to where it lies, so it cannot be copied."""
    if not (main_grad.is_contiguous() or main_grad.mT.is_contiguous()):
        raise bad_argument(
            "main_grad", "the strides of a dense weight", main_grad.stride(),
            "Make it with torch.zeros_like(weight, dtype=torch.float32).",
        )  # fmt: skip


def _for_tma(t: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as TMA takes it: on 16 bytes, with the strides of its shape.

    The first stride of a contiguous tensor is arbitrary where its first size is 1.
    """
    if t.shape[0] == 1:
        t = t.view(-1).view(t.shape)
    if t.data_ptr() % 16 == 0:
        return t
    say_once(
        f"a tensor of shape {tuple(t.shape)} does not start on 16 bytes and is copied each time"
    )
    return t.clone()
