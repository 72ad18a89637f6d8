"""What each rank does in test_torchtitan_parallel.py."""

import copy

import titan
import torch
from expert_parallel import whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.distributed.utils import set_spmd_backend

TOKENS = 200  # of each rank; with few, the errors of two right answers differ by chance


def step(layer, x, scores, ids, dout) -> dict[str, torch.Tensor]:
    """One rank's tokens; gradients of sharded weights put together."""
    x, scores = x.detach().requires_grad_(), scores.detach().requires_grad_()
    counts = ids.flatten().bincount(minlength=titan.EXPERTS)
    out = layer(x[None], scores[None], ids[None], counts)[0]
    out.backward(dout)
    weights = {n: whole(p.grad) for n, p in layer.inner_experts.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "scores": scores.grad, **titan.by_stock_name(weights)}


def tokens_of_every_rank(experts_used: list[int]):
    """(2 ranks, TOKENS, …), the same on each: scores, ids among some experts, gradients."""
    x, dout = torch.randn(2, 2, TOKENS, titan.D)
    choice = torch.rand(2, TOKENS, len(experts_used)).topk(titan.TOP_K).indices
    return x, torch.rand(2, TOKENS, titan.TOP_K), torch.tensor(experts_used)[choice], dout


def in_fp64(layer, x, scores, ids, dout) -> dict[str, torch.Tensor]:
    """All tokens in one process: every expert on every token, what was not chosen weighs 0."""

    def function(x, scores, *weights):
        weight = torch.zeros(*x.shape[:2], titan.EXPERTS, dtype=x.dtype).scatter(-1, ids, scores)
        rows, all_of_them = x.flatten(0, 1), torch.tensor([2 * TOKENS])
        outs = [
            titan.written_out(rows, all_of_them, *(w[e : e + 1] for w in weights))
            for e in range(titan.EXPERTS)
        ]
        return (torch.stack(outs, -1).unflatten(0, (2, TOKENS)) * weight[:, :, None]).sum(-1)

    weights = [getattr(layer.inner_experts, name) for name in titan.NAMES]
    exact = titan.in_fp64(function, x, scores, *weights, dout=dout)
    return dict(zip(("out", "x", "scores", *titan.NAMES), exact, strict=True))


def mine(found: dict, rank: int) -> dict:
    return {n: t if n in titan.NAMES else t[rank] for n, t in found.items()}


def experts_spread(rank: int, override: str, experts_used: list[int]) -> None:
    """torchtitan's own exchange, its experts and ours, against one process in fp64."""
    set_spmd_backend("partial_dtensor")
    stock, ours = titan.stock_and_ours(override)
    x, scores, ids, dout = tokens_of_every_rank(experts_used)
    scores = scores.bfloat16().float()
    exact = mine(in_fp64(stock, x, scores, ids, dout), rank)
    mesh, found = init_device_mesh("cpu", (2,)), []
    for layer in (stock, ours):
        layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
        for name, weight in list(layer.inner_experts.named_parameters()):
            shard = torch.nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
            layer.inner_experts.register_parameter(name, shard)
        found.append(step(layer, x[rank], scores[rank], ids[rank], dout[rank]))
    titan.within_budget(found[1], found[0], exact, tokens=2 * TOKENS)


def fully_sharded(rank: int, override: str) -> None:
    """fp32 in shards, bf16 in the layer: gradients are the mean over the ranks."""
    set_spmd_backend("partial_dtensor")
    stock, ours = titan.stock_and_ours(override)
    x, scores, ids, dout = tokens_of_every_rank([0, 1, 2, 3])
    scores = scores.bfloat16().float()
    exact = mine(in_fp64(stock, x, scores, ids, dout), rank)
    exact |= {name: exact[name] / 2 for name in titan.NAMES}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for layer in (copy.deepcopy(stock), ours):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        found.append(step(layer, x[rank], scores[rank], ids[rank], dout[rank]))
    titan.within_budget(found[1], found[0], exact, tokens=2 * TOKENS)
