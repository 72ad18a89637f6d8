"""Gradient clipping for parameters on more than one mesh."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

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
    return _norm_over_meshes(_by_mesh(parameters), norm_type, foreach)


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


def mesh_of(tensor: torch.Tensor) -> Any:
    """The mesh of a DTensor, None for other tensors."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _norm_over_meshes(
    by_mesh: dict[Any, list[torch.Tensor]], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """The norm of norms. Norms of shards are gathered: reductions of gloo lose a NaN."""
    norm_type = float(norm_type)
    by_layout: dict[Any, list[torch.Tensor]] = {}
    for p in (p for group in by_mesh.values() for p in group):
        gradient, layout = _without_partial(p.grad)
        by_layout.setdefault(layout, []).append(gradient)
    norms = []
    for (mesh, placements), gradients in by_layout.items():
        of_rank = _norms_of_rank(gradients, norm_type, foreach)
        if mesh is not None:
            ranks = [Replicate() if p.is_replicate() else Shard(0) for p in placements]
            gathered = DTensor.from_local(of_rank[None], mesh, ranks, run_check=False)
            of_rank = torch.linalg.vector_norm(gathered.full_tensor(), norm_type, dim=0)
        norms.append(of_rank)
    if not norms:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.cat([n.to(norms[0].device) for n in norms]), norm_type)


def _without_partial(gradient: Any) -> tuple[torch.Tensor, tuple]:
    """A gradient whose values are summed over the ranks; with its mesh and placements, if any."""
    if not isinstance(gradient, DTensor):
        return gradient, (None, ())
    placements = tuple(Replicate() if p.is_partial() else p for p in gradient.placements)
    if placements != gradient.placements:
        gradient = gradient.redistribute(placements=placements)
    return gradient.to_local(), (gradient.device_mesh, placements)


def _norms_of_rank(
    gradients: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """(1,), or a norm per gradient for norm type 0, which counts the gradients that are not 0."""
    dtype = functools.reduce(torch.promote_types, {g.dtype for g in gradients})
    # Without elements: what changes no norm.
    empty = gradients[0].new_full((), 0.0 if norm_type >= 0 else float("inf"), dtype=dtype)
    norms = []
    for part in [[g] for g in gradients] if norm_type == 0 else [gradients]:
        filled = [g for g in part if g.numel()]
        norm = nn.utils.get_total_norm(filled, norm_type, foreach=foreach) if filled else empty
        norms.append(norm.to(dtype))
    return torch.stack(norms)
