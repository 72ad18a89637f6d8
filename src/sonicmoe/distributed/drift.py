"""Refuse to train weights outside of the experts that would drift apart between expert ranks.

The ranks that share experts have their own tokens and so their own gradients. Over a mesh that
leaves some of them out, FSDP2 averages the gradients of the others only. An optimizer has all
parameters with their meshes, so its first step compares them, before anything has changed. No rank
waits for another: meshes are the same on all of them.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import bad_argument

_trained: weakref.WeakSet = weakref.WeakSet()  # layers, once an output of theirs requires grad
_checked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # optimizer -> what it was
_hooks: list = []


def note_training(layer: nn.Module) -> None:
    """From now on steps of optimizers are compared with the mesh of `layer`."""
    _trained.add(layer)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = (len(parameters), len(_trained))
    if _checked.get(optimizer) == state:
        return
    groups = {tuple(_ranks(layer.mesh)) for layer in _trained}
    for p in parameters:
        mesh = getattr(p, "device_mesh", None)
        if mesh is None or not p.requires_grad:
            continue
        ranks = _ranks(mesh)
        for group in groups:
            if not set(ranks).issuperset(group):
                raise bad_argument(
                    "optimizer",
                    f"parameters over all ranks that share experts, {list(group)}",
                    f"one of shape {tuple(p.shape)} over ranks {ranks}",
                    "Its copies would drift apart, since each of these ranks has its own tokens:"
                    " shard the model over all ranks, and only the MoE over the other dimension"
                    " of its mesh. If they have the same tokens outside of the MoE, call"
                    " parallelize(…, same_tokens=True).",
                )
    _checked[optimizer] = state


def _ranks(mesh: Any) -> list[int]:
    return mesh.mesh.flatten().tolist()
