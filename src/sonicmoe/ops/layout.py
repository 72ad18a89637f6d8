"""How tensors reach kernels: the one place that makes them dense.

A kernel computes addresses from shapes. It reads by strides only the weights, dense in either order
of their last two dimensions, and the rows of logits. Every other tensor argument of an operator is
made contiguous here. What TMA reads must also be 16-byte aligned. Tensors that the package itself
allocated are both, unless they come through PyTorch's dispatcher. What an operator writes to cannot
be copied: unless it is dense it is refused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

import torch

from ..errors import bad_argument, say_once

_WEIGHTS = frozenset(("w", "dense", "lora_a", "next_lora_a", "lora_b"))
# Read by TMA, or four at a time.
_ALIGNED = frozenset(("x", "dout", "values", "t", "z", "u", "w8", "w8_t", "codes", "q1", "q2"))
_BY_STRIDES = frozenset(("logits",))  # launchers copy them where columns are not adjacent
# In tuples, but perhaps the caller's memory.
_CALLERS = frozenset(("x", "dense", "bias", "lora_a", "lora_b", "codes"))

# Places among the arguments, or the fields of a tuple, with a rule or with the plan of a tuple.
Plan = list[tuple[int, Any]]


def plan_of(hints: dict[str, Any], mutated: Any, own: bool, in_tuple: bool = False) -> Plan:
    """How to make the parameters with these types dense; without `own` only those that may be in
    the caller's memory. `mutated` is the type of those that are written to."""
    plan: Plan = []
    for place, (name, hint) in enumerate(hints.items()):
        if hasattr(hint, "_fields"):
            if nested := plan_of(get_type_hints(hint), mutated, own, in_tuple=True):
                plan.append((place, nested))
        elif hint in (mutated, mutated | None):
            plan.append((place, partial(_written, name)))
        elif hint in (torch.Tensor, torch.Tensor | None):
            rule = _rule(name)
            if rule is not None and (own or not in_tuple or name in _CALLERS):
                plan.append((place, rule))
    return plan


def _rule(name: str) -> Callable | None:
    if name in _BY_STRIDES:
        return None
    if name in _WEIGHTS:
        return _weight
    return _aligned if name in _ALIGNED else _contiguous


def laid_out(values: Any, plan: Plan, for_kernels: bool) -> Any:
    """The arguments, or a tuple of them, with dense tensors."""
    changed: list | None = None
    for place, rule in plan:
        t = values[place]
        if t is None:
            continue
        found = laid_out(t, rule, for_kernels) if type(rule) is list else rule(t, for_kernels)
        if found is not t:
            changed = list(values) if changed is None else changed
            changed[place] = found
    if changed is None:
        return values
    return values._make(changed) if hasattr(values, "_make") else changed


def _contiguous(t: torch.Tensor, for_kernels: bool) -> torch.Tensor:
    return t if t.is_contiguous() else t.contiguous()


def _aligned(t: torch.Tensor, for_kernels: bool) -> torch.Tensor:
    if not t.is_contiguous():
        t = t.contiguous()
    return for_tma(t) if for_kernels else t


def _weight(w: torch.Tensor, for_kernels: bool) -> torch.Tensor:
    if w.dim() == 2:  # a router's
        return _aligned(w, for_kernels)
    w = dense_weight(w)
    if not for_kernels:
        return w
    if w.stride(2) == 1:
        return for_tma(w)
    stored = w.mT
    found = for_tma(stored)
    return w if found is stored else found.mT


def dense_weight(w: torch.Tensor) -> torch.Tensor:
    """Weights that lie in memory as (E, N, K) or (E, K, N) pass as they are; others are copied."""
    if w.is_contiguous() or w.mT.is_contiguous():
        return w
    if not torch.compiler.is_compiling():
        say_once(
            f"weights of shape {tuple(w.shape)}, strides {w.stride()}, are copied at every call"
        )
    return w.contiguous()


def _written(name: str, t: torch.Tensor, for_kernels: bool) -> torch.Tensor:
    """It is written to where it lies, so it cannot be copied."""
    if name == "main_grad":
        if not (t.is_contiguous() or t.mT.is_contiguous()):
            remedy = "Make it with torch.zeros_like(weight, dtype=torch.float32)."
            raise bad_argument(name, "the strides of a dense weight", t.stride(), remedy)
    elif not t.is_contiguous() or (for_kernels and t.data_ptr() % 16):
        got = f"strides {t.stride()} from element {t.storage_offset()} on"
        raise bad_argument(name, "a contiguous tensor, 16-byte aligned", got, "Use torch.empty.")
    return t


def for_tma(t: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as TMA takes it: 16-byte aligned, with the strides of its shape.

    The first stride of a contiguous tensor is arbitrary where its first size is 1.
    """
    if t.shape and t.shape[0] == 1:
        t = t.view(-1).view(t.shape)
    if t.data_ptr() % 16 == 0:
        return t
    say_once(f"a tensor of {t.dim()} dimensions is not 16-byte aligned and is copied at every call")
    return t.clone()
