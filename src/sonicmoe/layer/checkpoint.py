"""Inside an activation checkpoint, computing the output is left to a node that is not recomputed.

A checkpoint recomputes what the backward pass needs, and stops where it has the last of it. There
`Down` only keeps tensors and returns a placeholder; `Output` computes Y and O from it. At the end
of a checkpointed block `Output` never runs again.
"""

from collections.abc import Callable

import torch

Compute = Callable[[], torch.Tensor]


def deferred_output() -> list[Compute] | None:
    """An empty list for a node to put its computation into; None outside of a checkpoint."""
    return [] if packs_saved_tensors() else None


def packs_saved_tensors() -> bool:
    """Whether a checkpoint or another hook gets the tensors that a node saves.

    Compiled nodes need not know: torch.compile removes dead recomputation.
    """
    if torch.compiler.is_compiling():
        return False
    # No public function tells.
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def placeholder(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor with a shape, a dtype and a device, but without memory."""
    return like.new_empty_strided(shape, (0,) * len(shape), dtype=dtype)


def finish(out: torch.Tensor, deferred: list[Compute] | None) -> torch.Tensor:
    """`out`, or what was deferred; its gradient goes to the node that returned `out`."""
    return Output.apply(out, deferred.pop()) if deferred else out


class Output(torch.autograd.Function):
    """The output that a node deferred."""

    @staticmethod
    def forward(ctx, placeholder, compute):
        return compute()

    @staticmethod
    def backward(ctx, dout):
        return dout, None
