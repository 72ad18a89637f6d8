"""FSDP2 and DDP leave packed experts whole on each rank: frozen, they have no gradient to reduce.

Else FSDP2 would shard their dequantized values, and DDP would write to them. FSDP2 has no hook for
parameters that are never to be sharded, so functions of it are replaced.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import bad_argument


@functools.cache
def leave_whole(kind: type[torch.Tensor]) -> None:
    """Make FSDP2 and DDP leave parameters of class `kind` whole; FSDP1 raises."""
    register_module_module_registration_hook(functools.partial(_leave_out_of_ddp, kind))
    fsdp2 = "_fully_shard"
    for file in ("_fsdp_init", "_fully_shard"):  # which imports it by name
        _replace(f"{fsdp2}.{file}", "_move_states_to_device", _leave_out_of_fsdp2, kind)
    # Should the name above change, nothing is sharded in silence.
    _replace(f"{fsdp2}._fsdp_param", "FSDPParam._init_sharded_param", _refuse, kind)
    _replace("_flat_param", "FlatParamHandle.__init__", _refuse, kind)


def _replace(file: str, name: str, function: Callable, kind: type[torch.Tensor]) -> None:
    """Call `function(kind, original, …)` in place of a private function that PyTorch may have."""
    try:
        owner: Any = importlib.import_module(f"torch.distributed.fsdp.{file}")
        *outer, name = name.split(".")
        owner = functools.reduce(getattr, outer, owner)
        original = getattr(owner, name)
    except (ImportError, AttributeError):
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(kind, original, *args, **kwargs)

    setattr(owner, name, replaced)


def _leave_out_of_fsdp2(kind: Any, original: Any, params: list, buffers: Any, device: Any) -> None:
    """Move what `fully_shard` is about to shard to `device`; leave only that in `params`."""
    packed = [p for p in params if isinstance(p, kind)]
    params[:] = [p for p in params if not isinstance(p, kind)]
    original(params, buffers, device)
    for p in packed:
        if p.is_meta:
            raise bad_argument(
                "module",
                "packed experts that every rank has loaded",
                "experts on the meta device",
                "With accelerate, set fsdp_cpu_ram_efficient_loading: false.",
            )
        if p.device != device:
            moved = nn.Parameter(p.to(device), requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, moved)


def _refuse(kind: Any, original: Any, self: Any, given: Any, *args: Any, **kwargs: Any) -> None:
    params = [given] if isinstance(given, torch.Tensor) else list(given)
    if any(isinstance(p, kind) for p in params):
        raise bad_argument(
            "module",
            "packed experts that stay whole on each rank",
            f"{type(self).__name__} of packed experts",
            "Use FSDP2, with accelerate fsdp_version: 2; if that is what you use, pass"
            " fully_shard(…, ignored_params={p for p in model.parameters() if type(p) is"
            f" {kind.__name__}}}).",
        )
    original(self, given, *args, **kwargs)


def _leave_out_of_ddp(kind: Any, wrapper: nn.Module, _: str, module: nn.Module | None) -> None:
    """Called for each submodule that any module gets; DDP has its model as one.

    Packed experts become those of the first rank, as the rest of the model.
    """
    if module is None or not isinstance(wrapper, DistributedDataParallel):
        return
    for name, p in module.named_parameters(remove_duplicate=False):
        if isinstance(p, kind) and name not in wrapper.parameters_to_ignore:
            wrapper.parameters_to_ignore.add(name)
            for _, t in p.packed.tensors():
                values = t.flatten().view(torch.uint8)
                dist.broadcast(values, group=wrapper.process_group, group_src=0)
