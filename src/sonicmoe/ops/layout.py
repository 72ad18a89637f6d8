"""How tensors reach kernels: the one place that makes them dense.

A kernel computes addresses from shapes. It reads by strides only the weights, dense in either order
of their last two dimensions, and the rows of logits. Every other tensor argument of an operator is
made contiguous here. What TMA reads must also start on 16 bytes. Tensors in tuples are the
package's own and dense, unless they come through PyTorch's dispatcher: see `registry`.
"""

import torch

from ..errors import bad_argument
from ..notices import say_once

_WEIGHTS = frozenset(("w", "w1", "w2", "factor"))
_ROWS = frozenset(("x", "a", "z", "dz", "dout", "u"))  # read by TMA, as weights are
_E4M3 = frozenset(("x8", "a8", "q1", "q2"))  # read by TMA, or four at a time
_BY_STRIDES = frozenset(("logits",))  # launchers copy them where columns are not adjacent


class Layout:
    """Makes the tensor arguments of one operator dense, each by the name of its parameter."""

    def __init__(self, tensors: dict[int, str]) -> None:
        """`tensors` are the places and names of the tensor parameters."""
        self.adds_to_main_grad = tensors.get(0) == "main_grad"
        self.weights = [i for i, name in tensors.items() if name in _WEIGHTS]
        self.rows = [i for i, name in tensors.items() if name in _ROWS | _E4M3]
        special = _WEIGHTS | _ROWS | _E4M3 | _BY_STRIDES | {"main_grad"}
        self.others = [i for i, name in tensors.items() if name not in special]

    def dense(self, args: list, for_kernels: bool) -> list:
        """`args` with dense tensors; the list itself is changed."""
        if self.adds_to_main_grad:
            _check_main_grad(args[0])
        for i in self.others:
            t = args[i]
            if t is not None and not t.is_contiguous():
                args[i] = t.contiguous()
        for i in self.rows:
            t = args[i]
            if t is not None:
                args[i] = for_tma(t.contiguous()) if for_kernels else t.contiguous()
        for i in self.weights:
            w = dense_weight(args[i])
            if for_kernels:
                w = for_tma(w) if w.stride(2) == 1 else for_tma(w.mT).mT
            args[i] = w
        return args


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
            "main_grad",
            "the strides of a dense weight",
            main_grad.stride(),
            "Make it with torch.zeros_like(weight, dtype=torch.float32).",
        )


def for_tma(t: torch.Tensor) -> torch.Tensor:
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
