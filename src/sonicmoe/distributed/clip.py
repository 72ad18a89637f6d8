"""Gradient clipping for parameters on more than one mesh."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import bad_argument


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for a parallel model or its parameters, on any meshes.

    Every rank must call it. Returns the norm over all ranks before clipping, as a plain tensor. A
    gradient that is not a DTensor must be the same on every rank, and counts once.
    """
    by_mesh = _by_mesh(parameters)
    if not by_mesh:
        return torch.tensor(0.0)
    total = _norm_over_meshes(by_mesh, norm_type, foreach)
    if error_if_nonfinite and not total.isfinite():
        raise bad_argument(
            "parameters",
            "gradients with a finite norm",
            f"a norm of {total.item()}",
            "With error_if_nonfinite=False they are scaled by it.",
        )
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach)
    return total


def grad_norm(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    foreach: bool | None = None,
) -> torch.Tensor:
    """What `clip_grad_norm_` returns; the gradients stay as they are."""
    by_mesh = _by_mesh(parameters)
    return _norm_over_meshes(by_mesh, norm_type, foreach) if by_mesh else torch.tensor(0.0)


def _by_mesh(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
) -> dict[Any, list[torch.Tensor]]:
    """The parameters that have a gradient. Each group alone: operators on lists of tensors take
    one mesh at a time."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_mesh.setdefault(mesh_of(p.grad), []).append(p)
    return by_mesh


def _norm_over_meshes(
    by_mesh: dict[Any, list[torch.Tensor]], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    norms = [_total_norm(group, norm_type, foreach) for group in by_mesh.values()]
    total = norms[0]
    if len(norms) > 1:
        stacked = torch.stack([norm.to(norms[0]) for norm in norms])
        total = torch.linalg.vector_norm(stacked, norm_type)
    return total


def mesh_of(tensor: torch.Tensor) -> Any:
    """The mesh of a DTensor, None for other tensors."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _total_norm(
    parameters: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if math.isinf(norm_type):
        return _largest(gradients)
    norm = nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _largest(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The infinity norm, which PyTorch does not compute where a rank has an empty shard."""
    mesh = mesh_of(gradients[0])
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    largest = torch.stack([g.abs().max() if g.numel() else g.new_zeros(()) for g in local]).max()
    for dimension in range(mesh.ndim if mesh is not None else 0):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return largest
