"""Our errors where a function of PyTorch cannot take layers whose experts are spread.

PyTorch's own messages ("got mixed torch.Tensor and DTensor", "Invariant encountered") do not say
what to do.
"""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from ..errors import bad_argument
from .clip import mesh_of

_installed: list[type[nn.Module]] = []


def install(layer: type[nn.Module]) -> None:
    """Guard modules of class `layer`, from the first call on."""
    if layer not in _installed:
        _installed.append(layer)
        register_module_module_registration_hook(_refuse_replicas)
        _guard_fully_shard(layer)
        _guard_total_norm()


def _refuse_replicas(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Called for each submodule that any module gets; DDP has its model as one."""
    if module is None or not isinstance(wrapper, DistributedDataParallel):
        return
    excluded = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for prefix, layer in module.named_modules():
        names = {n for n, _ in layer.named_parameters(prefix)}
        if isinstance(layer, tuple(_installed)) and not names <= excluded:
            raise bad_argument(
                "module",
                "a model that is the same on every rank under DistributedDataParallel",
                f"{prefix or 'a layer'} with other experts on each",
                "Call sonicmoe.distributed.parallelize_model(model, mesh) instead.",
            )


def _guard_fully_shard(layer: type[nn.Module]) -> None:
    """`fully_shard` of a model reads from each module in it what was applied to it."""
    with contextlib.suppress(ImportError):  # of a private name, for an error message only
        from torch.distributed._composable.contract import REGISTRY_KEY

        def registry(self: nn.Module) -> Any:
            if REGISTRY_KEY not in self.__dict__:
                raise bad_argument(
                    "module",
                    "MoE layers that are sharded before their model",
                    f"a {type(self).__name__} that is not",
                    "Call sonicmoe.distributed.parallelize_model(model, mesh) on the model"
                    " instead of parallelize and fully_shard, or first fully_shard(moe, mesh=…)"
                    " over the ranks that do not share its experts.",
                )
            return self.__dict__[REGISTRY_KEY]

        setattr(layer, REGISTRY_KEY, property(registry))


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

    clip_grad._get_total_norm = total_norm  # type: ignore[attr-defined]
