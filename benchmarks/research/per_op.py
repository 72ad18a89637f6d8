"""Per-op timing: record the operators of one call, then time each on the same tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sonicmoe.ops.registry import NAMESPACE

from .timing import is_cuda, median_ms


@dataclass(frozen=True, slots=True)
class OpTime:
    """Median time of one operator, its FLOPs, and its traffic with every operand moved once."""

    name: str
    ms: float
    flops: int
    traffic: int

    @property
    def tflops(self) -> float:
        return self.flops / self.ms / 1e9

    @property
    def terabytes_per_s(self) -> float:
        return self.traffic / self.ms / 1e9


class _Catch(TorchDispatchMode):
    """Records the calls of our operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Callable[[], object]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == NAMESPACE:
            name = func._schema.name.removeprefix(f"{NAMESPACE}::")
            self.calls.append((name, lambda: (func(*args, **kwargs), args)))
        return func(*args, **kwargs)


def per_op_times(call: Callable[[], object], device: str | torch.device) -> list[OpTime]:
    """Times of the operators that one call runs, in order."""
    with _Catch() as caught:
        call()
    found = []
    for name, again in caught.calls:
        with torch.no_grad():
            with FlopCounterMode(display=False) as counter:
                operands = again()
            ms = median_ms(again, device, rep_ms=100)
        found.append(OpTime(name, ms, counter.get_total_flops(), _bytes(operands)))
    return found


def copy_terabytes_per_s(device: str | torch.device) -> float:
    """Bandwidth of a device copy, read and write: what an operator without a GEMM can reach."""
    source = torch.empty(2**30 if is_cuda(device) else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), device) / 1e9


def _bytes(operands: object) -> int:
    tensors = {id(t): t for t in tree_leaves(operands) if isinstance(t, torch.Tensor)}
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors.values())
