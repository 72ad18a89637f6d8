"""How tensors reach kernels: the one place that makes them dense.

A kernel computes addresses from shapes. It reads by strides only the weights, dense in either order
of their last two dimensions, and the rows of logits. Every other tensor argument of an operator is
made contiguous here. What TMA reads must also be 16-byte aligned; tensors in tuples are the
package's own, contiguous and aligned, unless they come through PyTorch's dispatcher. What an
operator writes to cannot be copied: unless it is dense it is refused.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import bad_argument, say_once

_WEIGHTS = frozenset(("w", "w1", "w2", "lora_b"))
_ROWS = frozenset(
    ("x", "a", "z", "dz", "dout", "lora_u", "left", "right", "rows")
)  # read by TMA, as weights are
_E4M3 = frozenset(("x8", "a8", "q1", "q2", "q", "dz8", "other_t"))  # read by TMA, or four at a time
_CALLERS = frozenset(("lora_u", "lora_b", "codes"))  # in tuples, but perhaps the caller's memory
_BY_STRIDES = frozenset(("logits",))  # launchers copy them where columns are not adjacent


class Layout:
    """Makes the tensor arguments of one operator dense, each by the name of its parameter."""

    def __init__(
        self,
        tensors: dict[int, str],
        tuples: dict[int, dict[int, str]],
        written: dict[int, str],
    ) -> None:
        """Places and names of the tensor parameters; places of the tuples, with those of their
        tensor fields; places and names of the parameters that the operator writes to."""
        self.written = list(written.items())
        self.weights = [i for i, name in tensors.items() if name in _WEIGHTS]
        self.rows = [i for i, name in tensors.items() if name in _ROWS | _E4M3]
        special = _WEIGHTS | _ROWS | _E4M3 | _BY_STRIDES
        self.others = [i for i, name in tensors.items() if name not in special]
        self.tuples = [(i, list(fields.items())) for i, fields in tuples.items()]
        callers = [(i, [f for f in fields if f[1] in _CALLERS]) for i, fields in self.tuples]
        self.callers = [(i, fields) for i, fields in callers if fields]

    def dense(self, args: list, for_kernels: bool, dispatched: bool = False) -> list:
        """`args` with dense tensors; the list itself is changed."""
        for i, name in self.written:
            if args[i] is not None:
                _check_written(args[i], name, for_kernels)
        for i in self.others:
            t = args[i]
            if t is not None and not t.is_contiguous():
                args[i] = t.contiguous()
        for i in self.rows:
            t = args[i]
            if t is not None:
                args[i] = for_tma(t.contiguous()) if for_kernels else t.contiguous()
        for i in self.weights:
            args[i] = _weight(args[i], for_kernels)
        for i, fields in self.tuples if dispatched else self.callers:
            args[i] = _tuple(args[i], fields, for_kernels)
        return args


def _weight(w: torch.Tensor, for_kernels: bool) -> torch.Tensor:
    w = dense_weight(w)
    if not for_kernels:
        return w
    return for_tma(w) if w.stride(2) == 1 else for_tma(w.mT).mT


def _tuple(values: Any, fields: Sequence[tuple[int, str]], for_kernels: bool) -> Any:
    changed = {}
    for i, field in fields:
        t = values[i]
        if t is None:
            continue
        if field in _WEIGHTS:
            changed[field] = _weight(t, for_kernels)
        else:
            changed[field] = for_tma(t.contiguous()) if for_kernels else t.contiguous()
    return values._replace(**changed) if changed else values


def dense_weight(w: torch.Tensor) -> torch.Tensor:
    """Weights that lie in memory as (E, N, K) or (E, K, N) pass as they are; others are copied."""
    if w.is_contiguous() or w.mT.is_contiguous():
        return w
    if not torch.compiler.is_compiling():
        say_once(
            f"weights of shape {tuple(w.shape)}, strides {w.stride()}, are copied at every call"
        )
    return w.contiguous()


def _check_written(t: torch.Tensor, name: str, for_kernels: bool) -> None:
    """It is written to where it lies, so it cannot be copied."""
    if name == "main_grad":
        if not (t.is_contiguous() or t.mT.is_contiguous()):
            remedy = "Make it with torch.zeros_like(weight, dtype=torch.float32)."
            raise bad_argument(name, "the strides of a dense weight", t.stride(), remedy)
    elif not t.is_contiguous() or (for_kernels and t.data_ptr() % 16):
        got = f"strides {t.stride()} from element {t.storage_offset()} on"
        raise bad_argument(name, "a contiguous tensor, 16-byte aligned", got, "Use torch.empty.")


def for_tma(t: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as TMA takes it: 16-byte aligned, with the strides of its shape.

    The first stride of a contiguous tensor is arbitrary where its first size is 1.
    """
    if t.dim() and t.shape[0] == 1:
        t = t.view(-1).view(t.shape)
    if t.data_ptr() % 16 == 0:
        return t
    say_once(
        f"a tensor of shape {tuple(t.shape)} is not 16-byte aligned and is copied at every call"
    )
    return t.clone()
