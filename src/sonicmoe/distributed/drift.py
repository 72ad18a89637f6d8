"""Refuse to train weights outside of the experts that would drift apart between expert ranks.

The ranks that share experts have their own tokens and so their own gradients. Over a mesh that
leaves some of them out, FSDP2 averages the gradients of the others only. An optimizer has all
parameters with their meshes, so its first step compares them, before anything has changed. This
needs no communication: meshes are the same on all ranks.
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
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    groups = {layer.ranks for layer in _ran}
    state = (len(parameters), groups)
    if not groups or _checked.get(optimizer) == state:
        return
    for p in parameters:
        mesh = getattr(p, "device_mesh", None)
        if mesh is None or not p.requires_grad:
            continue
        ranks = mesh.mesh.flatten().tolist()
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
