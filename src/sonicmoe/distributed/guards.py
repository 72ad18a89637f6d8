"""Our errors where a function of PyTorch cannot take layers whose experts are spread.

PyTorch's own messages ("got mixed torch.Tensor and DTensor", "Invariant encountered") do not say
what to do.
"""

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from ..errors import bad_argument
from .clip import mesh_of

_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_kinds: set[type[nn.Module]] = set()


def guard(layer: nn.Module) -> None:
    """Guard `layer`, whose parameters are DTensors over the ranks that share its experts."""
    if not _kinds:
        register_module_module_registration_hook(_refuse_replicas)
        _guard_fully_shard()
        _guard_total_norm()
    _kinds.add(type(layer))
    _layers.add(layer)


def _refuse_replicas(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Called for each submodule that any module gets; DDP has its model as one."""
    if module is None or not isinstance(wrapper, DistributedDataParallel):
        return
    excluded = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for prefix, layer in module.named_modules():
        names = {n for n, _ in layer.named_parameters(prefix)}
        if isinstance(layer, tuple(_kinds)) and not names <= excluded:
            raise bad_argument(
                "module",
                "a model that is the same on every rank under DistributedDataParallel",
                f"{prefix or 'a layer'} with other experts on each",
                "Call sonicmoe.distributed.parallelize_model(model, mesh) instead.",
            )


def _guard_fully_shard() -> None:
    """FSDP2 has no hook: it makes one object of this private class from each parameter."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

        original = FSDPParam._init_sharded_param
    except (ImportError, AttributeError):
        return  # then its own message remains

    @functools.wraps(original)
    def init_sharded_param(self: Any, param: nn.Parameter, *others: Any) -> None:
        try:
            original(self, param, *others)
        except (RuntimeError, TypeError) as error:
            ours = any(param is p for layer in _layers for p in layer.parameters())
            if not ours or isinstance(error, NotImplementedError):
                raise
            raise bad_argument(
                "module",
                "MoE layers that are sharded before the model around them",
                "one that is only parallelized",
                "Call sonicmoe.distributed.parallelize_model(model, mesh) on the model instead of"
                " parallelize and fully_shard, or first fully_shard(moe, mesh=…) over the ranks"
                " that do not share its experts.",
            ) from error

    setattr(FSDPParam, "_init_sharded_param", init_sharded_param)  # noqa: B010 for mypy


def _guard_total_norm() -> None:
    """`clip_grad_norm_` has no hook: it calls this function by its name in the module."""
    original = getattr(clip_grad, "_get_total_norm", None)
    if original is None:
        return

    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        meshes = {mesh_of(t) for t in tensors}
        if len(meshes) > 1:
            raise bad_argument(
                "parameters",
                "gradients on one mesh",
                f"{len(meshes)} meshes",
                "Call sonicmoe.distributed.clip_grad_norm_ instead.",
            )
        return original(tensors, norm_type, error_if_nonfinite, foreach)

    clip_grad._get_total_norm = total_norm
