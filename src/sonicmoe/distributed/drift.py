"""Refuse to train a model whose gradients do not fit together across expert ranks.

The ranks that share experts have their own tokens and so their own gradients. Over a mesh that
leaves some of them out, FSDP2 averages the gradients of the others only, and the copies of a weight
drift apart. An optimizer has all parameters with their meshes, so its first step compares them,
before anything has changed. This needs no communication: meshes are the same on all ranks.
"""

import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import bad_argument

_ran: weakref.WeakSet = weakref.WeakSet()  # layers whose output required grad since the last step
_stepped = False  # whether an optimizer has made a step since
_checked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # optimizer -> what was compared
_hooks: list = []


def note_training(layer: Any) -> None:
    """Make the next optimizer step compare its meshes with `layer`, whose output requires grad.

    Layers of an earlier model, which may still be alive, are forgotten with the first call after a
    step.
    """
    global _stepped
    if _stepped:
        _ran.clear()
        _stepped = False
    if not layer.same_tokens:
        _ran.add(layer)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _stepped
    if torch.compiler.is_compiling():
        return
    _stepped = True
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    state = (len(parameters), {id(layer) for layer in _ran})
    if not _ran or _checked.get(optimizer) == state:
        return
    meshes = [(p, ranks) for p in parameters if (ranks := _ranks(p))]
    of_layers = {id(p) for layer in _ran for p in layer.parameters()}
    for layer in _ran:
        _check_copies(layer, meshes)
        _check_average(layer, [ranks for p, ranks in meshes if id(p) not in of_layers])
    _checked[optimizer] = state


def _check_copies(layer: Any, meshes: list[tuple[torch.Tensor, tuple[int, ...]]]) -> None:
    """Raise if copies of a weight would get other gradients on some ranks."""
    held = set(_ranks(layer.c_fc.weight))
    for p, ranks in meshes:
        if not set(ranks).issuperset(layer.ranks):
            raise bad_argument(
                "optimizer",
                f"parameters over all ranks that share experts, {list(layer.ranks)}",
                f"one of shape {tuple(p.shape)} over ranks {list(ranks)}",
                "Its copies would drift apart, since each of these ranks has its own tokens:"
                " call sonicmoe.distributed.parallelize_model(model, mesh), which shards the model"
                " over all ranks. If they have the same tokens outside of the MoE, call"
                " parallelize(…, same_tokens=True).",
            )
        if held == set(layer.ranks) and held < set(ranks):
            raise bad_argument(
                "optimizer",
                f"experts over all ranks of the model, {list(ranks)}",
                f"a MoE over ranks {sorted(held)} only",
                "Its copies would drift apart: call sonicmoe.distributed.parallelize_model(model,"
                " mesh), or fully_shard(moe, mesh=…) over the ranks that do not share its experts.",
            )


def _check_average(layer: Any, others: list[tuple[int, ...]]) -> None:
    """Raise if gradients beside the layer are means over ranks that the layer sums over."""
    sums = len(layer.ranks) > 1 and not _has_divisor(layer)
    if sums and any(set(ranks).issuperset(layer.ranks) for ranks in others):
        raise bad_argument(
            "optimizer",
            "gradients of the MoE that are means over all ranks, as those beside it",
            f"sums over the ranks that share experts, {list(layer.ranks)}",
            "Call sonicmoe.distributed.parallelize_model(model, mesh). By hand: after"
            " fully_shard(moe, mesh=…), moe.set_gradient_divide_factor(number of all ranks).",
        )


def _has_divisor(layer: Any) -> bool:
    """Whether FSDP2 has been told what to divide by; else it averages over its own ranks only."""
    if not hasattr(layer, "_get_fsdp_state"):
        return False
    state = layer._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # PyTorch 2.11
        groups = [getattr(state, "_fsdp_param_group", None)]
    # Private names: if they change, nothing is refused.
    return any(getattr(group, "gradient_divide_factor", True) is not None for group in groups)


def _ranks(p: torch.Tensor) -> tuple[int, ...]:
    """The ranks of a DTensor; empty for other tensors."""
    mesh = getattr(p, "device_mesh", None)
    return () if mesh is None else tuple(mesh.mesh.flatten().tolist())
