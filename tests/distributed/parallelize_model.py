"""A small GPT with MoE blocks, and what each rank does with it in test_parallelize_model.py."""

import copy
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from expert_parallel import whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sonicmoe import MoE
from sonicmoe.distributed import clip_grad_norm_, parallelize, parallelize_model
from sonicmoe.distributed.clip import grad_norm

VOCABULARY, WIDTH, LENGTH, PER_RANK = 32, 16, 8, 2


class Block(nn.Module):
    def __init__(self, dense: bool, experts: int, **options) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.dense = nn.Linear(WIDTH, WIDTH) if dense else None
        self.moe = (
            None if dense else MoE(experts, 2, WIDTH, 8, shared_intermediate_size=8, **options)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.dense is not None:
            return x + self.dense(x), 0.0
        assert self.moe is not None
        out, aux_loss = self.moe(x)
        out += x  # in place, which FSDP2 allows unless it is a view
        return out, aux_loss


class GPT(nn.Module):
    """The first block is dense; the head is the embedding. Returns the loss."""

    def __init__(self, experts: int = 8, **options) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {
                "embed": nn.Embedding(VOCABULARY, WIDTH),
                "blocks": nn.ModuleList(Block(i == 0, experts, **options) for i in range(3)),
            }
        )
        self.register_buffer("scale", torch.rand(()))

    def forward(self, ids):
        body: Any = self.body
        x, aux_losses = body["embed"](ids), []
        for block in body["blocks"]:
            x, aux_loss = block(x)
            aux_losses.append(aux_loss)
        logits = F.linear(self.scale * x, body["embed"].weight)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return loss + 0.01 * sum(aux_losses)


def model(seed: int = 0, dtype: torch.dtype = torch.float32, **options) -> Any:
    torch.manual_seed(seed)
    return GPT(**options).to(dtype)


def mesh(*shape: int):
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "expert"))


def sequences(step: int, ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (PER_RANK * ranks, 1), generator=generator)
    return (start + 3 * torch.arange(LENGTH)) % VOCABULARY


def mine(ids: torch.Tensor, rank: int) -> torch.Tensor:
    return ids[PER_RANK * rank : PER_RANK * (rank + 1)]


def gradients_are_those_of_the_mean(rank: int, shape, dtype, experts, options: dict) -> None:
    """Of every parameter, and twice as large after a second backward pass; the norm likewise."""
    ids, ranks = sequences(0, dist.get_world_size()), dist.get_world_size()
    one = model(0, dtype, experts=experts)
    many = parallelize_model(model(rank, dtype, experts=experts), mesh(*shape), **options)
    torch.stack([one(mine(ids, r)) for r in range(ranks)]).mean().backward()
    tolerance: dict[str, Any] = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    for times in (1, 2):
        many(mine(ids, rank)).backward()
        for (name, p), q in zip(one.named_parameters(), many.parameters(), strict=True):
            torch.testing.assert_close(whole(q.grad), times * p.grad, **tolerance, msg=name)
    for norm_type in (2.0, float("inf")):
        largest = torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9, norm_type)
        found = clip_grad_norm_(many, 1e9, norm_type)
        assert not isinstance(found, DTensor)
        torch.testing.assert_close(found, 2 * largest)
    norm = clip_grad_norm_(many.parameters(), 0.1)
    assert norm > 0.2
    scale = 0.1 / (norm + 1e-6)
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), 2 * scale * p.grad, **tolerance)


def shared(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """A model whose layers share a weight of the experts and their router."""
    net = model(seed, dtype)
    first, second = (block.moe for block in net.body["blocks"][1:])
    second.c_fc.weight, second.router = first.c_fc.weight, first.router
    first.c_fc.weight.decay, net.body["embed"].weight.decay = False, 0.5
    return net


def layers_that_share_train_as_one_process(rank: int, shape: tuple[int, int]) -> None:
    one, many = shared(0), parallelize_model(shared(rank), mesh(*shape))
    names = [name for name, _ in one.named_parameters()]
    assert [name for name, _ in many.named_parameters()] == names
    first, second = (block.moe for block in many.body["blocks"][1:])
    assert first.c_fc.weight is second.c_fc.weight and first.router is second.router
    assert first.c_fc.weight.decay is False and many.body["embed"].weight.decay == 0.5
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (one, many)]
    for step in range(3):
        ids = sequences(step, 4)
        torch.stack([one(mine(ids, r)) for r in range(4)]).mean().backward()
        many(mine(ids, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, p in one.named_parameters():
        torch.testing.assert_close(whole(many.get_parameter(name)), p, msg=name)


def summed(counts: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(counts)
    return counts


def train_as_one_process(rank: int, steps: int, folder: str) -> list[tuple[float, float]]:
    """Losses of one process and of four ranks; saves a checkpoint and the whole weights."""
    one, ranks = model(experts=6), dist.get_world_size()
    many = parallelize_model(model(experts=6, all_reduce_counts=summed), mesh(2, 2))
    # At 1e-2 the model is so far from linear that rounding grows to 2e-5 in 20 steps.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (one, many)]
    losses = []
    for step in range(steps):
        ids = sequences(step, ranks)
        mean = many(mine(ids, rank))
        mean.backward()
        want = one(ids)
        want.backward()
        clip_grad_norm_(many, 1.0)
        clip_grad_norm_(one, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((want.item(), summed(mean.detach()).item() / ranks))
    for name, p in many.named_parameters():
        _same_on_all_ranks(name, p)
    state = _state(many, optimizers[1])
    dcp.save(state, checkpoint_id=folder)
    full = {name: whole(t) for name, t in state["model"].items()}
    moments = {n: whole(m["exp_avg"]) for n, m in state["optim"]["state"].items()}
    if rank == 0:
        torch.save((full, moments), f"{folder}/whole.pt")
    return losses


def _same_on_all_ranks(name: str, p: torch.Tensor) -> None:
    """Copies on ranks that share a weight, and the whole weight on all ranks, bit for bit."""
    assert isinstance(p, DTensor)
    for dimension, placement in enumerate(p.placements):
        if isinstance(placement, Replicate):
            _equals_that_of_first(name, p.to_local(), p.device_mesh.get_group(dimension))
    _equals_that_of_first(name, whole(p), dist.group.WORLD)


def _equals_that_of_first(name: str, t: torch.Tensor, group) -> None:
    first = t.detach().clone()
    dist.broadcast(first, group=group, group_src=0)
    assert torch.equal(first, t), name


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(module, optimizer)
    return {"model": weights, "optim": moments}


def load(rank: int, shape: tuple[int, int], folder: str) -> None:
    """A checkpoint of another layout goes into a model that begins on the meta device."""
    with torch.device("meta"):
        many = model(experts=6)
    parallelize_model(many, mesh(*shape))
    many.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(many.parameters(), lr=1e-2)
    state = _state(many, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        many, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    found = _state(many, optimizer)
    weights, moments = torch.load(f"{folder}/whole.pt")
    for name, t in weights.items():
        assert torch.equal(whole(found["model"][name]), t), name
    for name, t in moments.items():
        assert torch.equal(whole(found["optim"]["state"][name]["exp_avg"]), t), name


def optimizers_step_as_one_by_one(rank: int) -> None:
    """With lists of parameters on two meshes, as on a GPU by default, and fused."""
    stepped = []
    kinds: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
    for options in kinds:
        many = parallelize_model(model(), mesh(2, 2))
        optimizer = torch.optim.AdamW(many.parameters(), lr=0.1, **options)
        for step in range(2):
            many(mine(sequences(step, 4), rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        stepped.append([p.to_local() for p in many.parameters()])
    for found in stepped[1:]:
        torch.testing.assert_close(found, stepped[0], rtol=1e-5, atol=1e-6)


NORM_TYPES = (0, 0.5, 1, 2, 3, float("inf"), -1, -float("inf"))


def norms_of_every_type(rank: int) -> None:
    """Of whole gradients, on any mesh and with any placements; a NaN of one rank is one of all."""
    square = mesh(2, 2)
    flat = square._flatten()
    wholes = [
        torch.randn(6, 4),
        torch.eye(5, 1).bfloat16(),  # whose norms bf16 does not round
        torch.randn(2, 3),
        torch.tensor(0.7),
        torch.randn(3, 4),
        torch.randn(4, 3),
        torch.randn(4, 4) + rank_values(),
        torch.zeros(3),
        torch.zeros(4, 2),
    ]
    gradients = [
        wholes[0],
        distribute_tensor(wholes[1], flat, [Shard(0)]),  # uneven
        distribute_tensor(wholes[2], flat, [Shard(0)]),  # two ranks have none
        distribute_tensor(wholes[3], square, [Replicate(), Replicate()]),
        distribute_tensor(wholes[4], square, [Replicate(), Shard(1)]),
        DTensor.from_local(wholes[5] * (rank - 0.5) / 4, flat, [Partial()]),  # sums to it
        distribute_tensor(wholes[6], square, [Shard(0), Shard(1)]),
        wholes[7],
        distribute_tensor(wholes[8], square, [Shard(0), Replicate()]),
    ]
    for some in (slice(0, 9), slice(5, 6), slice(6, 7)):
        for norm_type in NORM_TYPES:
            want = torch.nn.utils.get_total_norm(wholes[some], norm_type)
            parameters = [_with_gradient(g) for g in gradients[some]]
            torch.testing.assert_close(grad_norm(parameters, norm_type), want)
            found = clip_grad_norm_((p for p in parameters), 0.5, norm_type)
            torch.testing.assert_close(found, want)
            scale = (0.5 / (want + 1e-6)).clamp(max=1)
            for p, t in zip(parameters, wholes[some], strict=True):
                torch.testing.assert_close(whole(p.grad), (scale * t).to(t.dtype))
    for holder in range(4):
        local = torch.full((2,), torch.nan if rank == holder else 1.0)
        broken = _with_gradient(DTensor.from_local(local, flat, [Shard(0)]))
        for norm_type in NORM_TYPES[1:]:
            call = partial(clip_grad_norm_, broken, 1.0, norm_type, error_if_nonfinite=True)
            assert "got a norm of nan" in _message(call), norm_type


def rank_values() -> torch.Tensor:
    """The largest and the smallest element of (4, 4) on different ranks of a mesh of 2 by 2."""
    return torch.tensor([[9.0, 9, 40, 40]] * 2 + [[3.0, 3, 20, 20]] * 2)


def _with_gradient(gradient: torch.Tensor) -> torch.Tensor:
    p = torch.zeros(gradient.shape, requires_grad=True, dtype=gradient.dtype)
    if not isinstance(gradient, DTensor):
        p.grad = gradient.clone()
        return p
    sizes: dict[str, Any] = {"shape": gradient.shape, "stride": gradient.stride()}
    local, grid = gradient.to_local().clone(), gradient.device_mesh
    p = DTensor.from_local(torch.zeros_like(local), grid, gradient.placements, **sizes)
    p.requires_grad_().grad = DTensor.from_local(local, grid, gradient.placements, **sizes)
    return p


def blocks_and_policy(rank: int) -> None:
    """Which modules are sharded by themselves, and bf16 where the policy says so."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found, seen = [], []
    for by_default in (True, False):
        many = model()
        last = many.body["blocks"][2]
        chosen = None if by_default else [last, last.norm]
        parallelize_model(
            many, mesh(2, 2), blocks=chosen, mp_policy=policy, reshard_after_forward=False
        )
        last.register_forward_hook(lambda m, i, out: seen.append(out[0].dtype))
        many(mine(sequences(0, 4), rank)).backward()
        found.append([n for n, m in many.named_modules() if isinstance(m, FSDPModule)])
    names = ["body.blocks.0", "body.blocks.1", "body.blocks.1.moe", "body.blocks.2"]
    assert found[0] == ["", *names, "body.blocks.2.moe"]
    ours = ["body.blocks.1.moe", "body.blocks.2", "body.blocks.2.norm", "body.blocks.2.moe"]
    assert found[1] == ["", *ours]
    assert seen == [torch.bfloat16, torch.bfloat16]


def refusals(rank: int) -> dict[str, str]:
    """What the errors say."""
    grid = mesh(2, 2)
    parallel = parallelize_model(model(), grid)
    parallel(mine(sequences(0, 4), rank)).backward()
    only_layers = model()
    for block in only_layers.body["blocks"][1:]:
        parallelize(block.moe, grid["expert"])
    layers = model()
    for block in layers.body["blocks"][1:]:
        parallelize(block.moe, grid["expert"])
    plain, group = model(), cast(Any, dist.group.WORLD)
    calls = {
        "DDP": lambda: DistributedDataParallel(parallel),
        "DDP of layers": lambda: DistributedDataParallel(only_layers),
        "fully_shard": lambda: fully_shard(only_layers, mesh=grid._flatten()),
        "torch's clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1),
        "twice": lambda: parallelize_model(parallel, grid),
        "no layer": lambda: parallelize_model(nn.Linear(8, 8), grid),
        "one dimension": lambda: parallelize_model(plain, grid["expert"]),
        "other names": lambda: parallelize_model(plain, init_device_mesh("cpu", (2, 2))),
        "no mesh": lambda: parallelize_model(plain, group),
        "blocks": lambda: parallelize_model(plain, grid, blocks=[model().body["blocks"][1]]),
        "hook": lambda: parallelize_model(_with("register_hook"), grid),
        "hook of a layer": lambda: parallelize(
            _with("register_post_accumulate_grad_hook").body["blocks"][1].moe, grid["expert"]
        ),
        "main_grad": lambda: parallelize_model(_with_main_grad(model()), grid),
        "main_grad afterwards": lambda: _with_main_grad(layers)(mine(sequences(0, 4), rank)),
        "shared with a dense block": lambda: parallelize_model(_shared_with_dense(), grid),
        "float64": lambda: parallelize_model(model(0, torch.float64), mesh(1, 4)),
        "not finite": lambda: clip_grad_norm_(_with_nan(), 1.0, error_if_nonfinite=True),
    }
    return {name: _message(call) for name, call in calls.items()}


def _with(register: str) -> Any:
    net = model()
    getattr(net.body["blocks"][1].moe.router.weight, register)(lambda gradient: None)
    return net


def _with_main_grad(net: Any) -> Any:
    weight = net.body["blocks"][1].moe.c_fc.weight
    weight.main_grad = torch.zeros_like(weight)
    return net


def _shared_with_dense() -> Any:
    net = model()
    net.body["blocks"][1].norm.weight = net.body["blocks"][2].norm.weight
    return net


def _with_nan() -> torch.Tensor:
    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.tensor([1.0, torch.nan])
    return p


def _message(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def copy_of_a_layer_in_ddp(rank: int) -> None:
    """DDP takes a model whose expert-parallel parameters it is told to leave alone."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity())
    net[1] = parallelize(MoE(8, 2, WIDTH, 8), mesh(1, dist.get_world_size())["expert"])
    names = [name for name, _ in net.named_parameters() if name.startswith("1.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    assert copy.copy(DistributedDataParallel(net)).module is net
