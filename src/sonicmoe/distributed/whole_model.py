"""A whole model: experts over one dimension of a mesh, everything else over all of its ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import bad_argument
from ..moe import MoE
from .module import check_plain, parallelize

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

Model = TypeVar("Model", bound=nn.Module)
_EXPERT = "expert"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def parallelize_model(
    model: Model,
    mesh: DeviceMesh,
    *,
    blocks: Iterable[nn.Module] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
) -> Model:
    """Spread the experts of each `MoE` in `model` over mesh["expert"], shard the rest; in place.

    `mesh` has two dimensions, one of them named "expert". FSDP2 shards each rank's experts over the
    other one, and all other parameters over all ranks, block by block. `blocks` are the modules to
    gather and free together; by default the entries of the model's lists that contain a MoE, and
    the entries of the same class. The other options are those of `fully_shard`. Weights and buffers
    become those of the first rank.

    Each rank passes its own tokens and calls `backward` on the mean loss over them, as under FSDP2:
    the gradient of every parameter is then that of the mean over all ranks. Clip it with
    `sonicmoe.distributed.clip_grad_norm_`; optimizers take `model.parameters()`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    others = _other_dimension(mesh)
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    if not layers:
        raise bad_argument(
            "model",
            "a model that contains a sonicmoe.MoE",
            f"{type(model).__name__} without one",
            "Without experts to spread, call fully_shard.",
        )
    shared: dict[int, list[str]] = {}
    attributes = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(p), []).append(name)
        attributes[name] = dict(vars(p))
        check_plain(name, p)
        if isinstance(p, DTensor):
            raise bad_argument(
                "model",
                "a model that is not sharded yet",
                f"a DTensor as {name}",
                "Call parallelize_model once, instead of parallelize and fully_shard.",
            )
    units = _inner_first(_default_blocks(model) if blocks is None else blocks, model)
    everyone = mesh._flatten()
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    options: Any = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    average = mesh[_EXPERT].size() > 1
    if average and mesh[others].size() == 1:
        _check_reduce_dtype(layers, policy)
    _copy_from_first_rank(model, everyone)
    for layer in layers:
        parallelize(layer, mesh[_EXPERT])
    for group in _that_share(layers):
        fully_shard(group, mesh=mesh[others], **options)
        if average:
            shards: Any = group[0]
            # The layer sums over the ranks that share its experts, FSDP2 over the others.
            shards.set_gradient_divide_factor(mesh.size())
            # Gloo has no sum that divides. Over one rank FSDP2 would divide twice.
            shards.set_force_sum_reduction_for_comms(mesh[others].size() > 1)
    around: list[nn.Module] = [*units, model]
    for unit in around:
        if not isinstance(unit, MoE):
            fully_shard(unit, mesh=everyone, **options)
    for names in shared.values():
        if len({id(model.get_parameter(name)) for name in names}) > 1:
            raise bad_argument(
                "model",
                "weights that only MoE layers share, or only one block",
                f"one as {' and '.join(names)}",
                "Their copies would drift apart: build the model again with weights of their own.",
            )
    for name, p in model.named_parameters():
        vars(p).update(attributes[name])
    return model


def _that_share(layers: list[MoE]) -> list[list[nn.Module]]:
    """The layers in groups that have no parameter in common: FSDP2 shards each group at once."""
    groups: list[tuple[list[nn.Module], set[int]]] = []
    for layer in layers:
        found: list[nn.Module] = [layer]
        ids = {id(p) for p in layer.parameters()}
        for group in [g for g in groups if g[1] & ids]:
            groups.remove(group)
            found, ids = group[0] + found, group[1] | ids
        groups.append((found, ids))
    return [group for group, _ in groups]


def _other_dimension(mesh: DeviceMesh) -> str:
    """The name of the dimension that is not "expert"."""
    if not isinstance(mesh, DeviceMesh):
        got: Any = type(mesh).__name__
    else:
        names = mesh.mesh_dim_names or ()
        others = [name for name in names if name != _EXPERT]
        if len(names) == 2 and len(others) == 1:
            return others[0]
        got = names or f"{mesh.ndim} without names"
    raise bad_argument(
        "mesh",
        f"a DeviceMesh of two dimensions, one of them named {_EXPERT!r}",
        got,
        "For n ranks that share experts: init_device_mesh(device, (ranks // n, n),"
        f' mesh_dim_names=("data", "{_EXPERT}")).',
    )


def _default_blocks(module: nn.Module) -> list[nn.Module]:
    """Entries of the outermost containers that contain a MoE, and their siblings of that class."""
    entries = [child for child in module.children() if not isinstance(child, MoE)]
    with_experts = [e for e in entries if any(isinstance(m, MoE) for m in e.modules())]
    if not isinstance(module, _CONTAINERS):
        return [block for child in with_experts for block in _default_blocks(child)]
    kinds = {type(e) for e in with_experts if not isinstance(e, _CONTAINERS)}
    nested = [e for e in with_experts if isinstance(e, _CONTAINERS)]
    found = [e for e in entries if type(e) in kinds]
    return found + [block for child in nested for block in _default_blocks(child)]


def _inner_first(blocks: Iterable[nn.Module], model: nn.Module) -> list[nn.Module]:
    """In the order that FSDP2 wants."""
    chosen, inside = set(blocks), list(model.modules())
    for block in chosen:
        if block is model or block not in inside:
            raise bad_argument(
                "blocks",
                "modules inside of the model",
                type(block).__name__,
                "Pass for example model.blocks; the model itself is always sharded.",
            )
    return [module for module in reversed(inside) if module in chosen]


def _check_reduce_dtype(layers: list[MoE], policy: MixedPrecisionPolicy) -> None:
    """FSDP2 divides gradients twice in other dtypes if there is nothing to reduce."""
    for layer in layers:
        dtype = policy.reduce_dtype or policy.param_dtype or layer.c_fc.weight.dtype
        if dtype not in (torch.float32, torch.bfloat16):
            raise bad_argument(
                "mp_policy",
                "gradients in float32 or bfloat16 where all ranks share the experts",
                dtype,
                "Set reduce_dtype=torch.float32.",
            )


@torch.no_grad()
def _copy_from_first_rank(model: nn.Module, everyone: DeviceMesh) -> None:
    """FSDP2 takes each rank's own values, which may have come from different seeds."""
    group, device = everyone.get_group(), everyone.device_type
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if not tensor.is_meta and tensor.numel():
            values = tensor.to(device).contiguous()
            dist.broadcast(values.flatten().view(torch.uint8), group=group, group_src=0)
            tensor.copy_(values)
