"""What each rank does in test_whole_model.py."""

import copy
from typing import Any, cast

import torch
import torch.distributed as dist
from expert_parallel import whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sonicmoe import MoE
from sonicmoe.distributed import parallelize
from sonicmoe.routing import Sigmoid


class _Model(torch.nn.Module):
    """A layer with weights before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.moe = torch.nn.Linear(16, 16), MoE(4, 2, 16, 8, router="sigmoid")
        self.after = torch.nn.Linear(16, 16)

    def forward(self, x):
        out, aux = self.moe(self.before(x))
        return self.after(out).square().mean() + aux


def _spread(mesh, others, **options) -> _Model:
    torch.manual_seed(0)
    model = _Model()
    parallelize(model.moe, mesh["expert"], **options)
    fully_shard(model.moe, mesh=mesh["data"])
    fully_shard(model, mesh=others)
    return model


def _mesh(*shape: int):
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "expert"))


def model_that_would_drift(rank: int, shape: tuple[int, int], names: list[str], **options) -> str:
    """The error of an optimizer's step, which changes nothing; `names` begin its parameters."""
    mesh = _mesh(*shape)
    model = _spread(mesh, mesh["data"], **options)
    parameters: list[Any] = [p for n, p in model.named_parameters() if n.startswith(tuple(names))]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    with torch.no_grad():
        model(torch.randn(5, 16))
    before = [p.to_local().clone() for p in parameters]
    torch.manual_seed(rank)
    model(torch.randn(5, 16)).backward()
    try:
        optimizer.step()
    except ValueError as error:
        now = [p.to_local() for p in parameters]
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        return str(error)
    return "no error"


def model_on_the_same_tokens(rank: int) -> str:
    return model_that_would_drift(rank, (1, 2), ["before"], same_tokens=True)


def _error_of_a_step(model: _Model, optimizer: torch.optim.Optimizer | None = None) -> str:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(5, 16)).backward()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "no error"


def model_that_would_drift_later(rank: int) -> list[str]:
    """Its weights beside the experts are frozen in the first step of an optimizer."""
    mesh = _mesh(1, 2)
    model = _spread(mesh, mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.after.requires_grad_(False)
    model.before.requires_grad_(False)
    first = _error_of_a_step(model, optimizer)
    model.before.requires_grad_(True)
    return [first, _error_of_a_step(model, optimizer)]


def experts_that_would_drift(rank: int) -> str:
    """The model is averaged over all ranks, the layer over those that share its experts only."""
    model = _Model()
    parallelize(model.moe, _mesh(2, 2)["expert"])
    for module in (model.before, model.after):
        fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    return _error_of_a_step(model)


def sums_beside_means(rank: int) -> str:
    return _error_of_a_step(_spread(_mesh(2, 2), init_device_mesh("cpu", (4,))))


def model_over_all_ranks(rank: int) -> None:
    """By hand: allowed, and after some steps every rank has the same weights."""
    mesh = _mesh(2, 2)
    model = _spread(mesh, init_device_mesh("cpu", (4,)))
    cast(Any, model.moe).set_gradient_divide_factor(4)
    cast(Any, model.moe).set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(5, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        mine, of_first = whole(p).detach(), whole(p).detach().clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(mine, of_first), name


def _summed(load):
    dist.all_reduce(load)
    return load


def biases_of_ranks(rank: int, kind: str) -> str:
    """What `update_bias` says without a sum over the ranks; with it biases are the same."""
    torch.manual_seed(0)
    moe = MoE(4, 2, 16, 8, router="sigmoid")
    mesh = init_device_mesh("cpu", (2,))
    if kind == "FSDP2":
        moe = copy.deepcopy(moe)  # the copy's router belongs to the copy
        fully_shard(moe, mesh=mesh)
    else:
        parallelize(moe, mesh)
    torch.manual_seed(rank)
    moe(torch.randn(9, 16))[0].sum().backward()
    router = cast(Sigmoid, moe.routing)
    try:
        router.update_bias(0.1)
    except ValueError as error:
        router.update_bias(0.1, all_reduce=_summed)
        first = router.selection_bias.clone()
        dist.broadcast(first, 0)
        assert torch.equal(router.selection_bias, first) and first.any()
        return str(error)
    return "no error"
