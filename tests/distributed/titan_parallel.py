"""What each rank does in test_torchtitan_parallel.py."""

import spmd_types
import titan
import torch
from expert_parallel import whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter
from torchtitan.models.common.moe_sharding import set_moe_sharding_config

TOKENS = 200  # of each rank; with few, the errors of two right answers differ by chance


def step(layer, x, scores, ids, dout, part) -> dict[str, torch.Tensor]:
    """One rank's tokens, and of each weight's gradient the part that is asked for."""
    x, scores = x.detach().requires_grad_(), scores.detach().requires_grad_()
    counts = ids.flatten().bincount(minlength=titan.EXPERTS)
    out = layer(x[None], scores[None], ids[None], counts)[0]
    out.backward(dout)
    weights = {n: part(p.grad) for n, p in layer.inner_experts.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "scores": scores.grad, **titan.by_stock_name(weights)}


def local(t):
    return t.to_local() if hasattr(t, "to_local") else t


def tokens_of_every_rank(routing: str):
    """(2 ranks, TOKENS, …), the same on each: x, scores that bf16 holds exactly, ids, gradients."""
    x, dout = torch.randn(2, 2, TOKENS, titan.D)
    scores = torch.rand(2, TOKENS, titan.TOP_K).bfloat16().float()
    if routing == "even":  # one expert on each rank for every token
        return x, scores, torch.randint(2, scores.shape) + torch.tensor([0, 2]), dout
    busy = 2 if routing == "one-rank-idle" else titan.EXPERTS
    return x, scores, torch.rand(2, TOKENS, busy).topk(titan.TOP_K).indices, dout


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


def experts_spread(rank: int, override: str, backend: str, routing: str) -> None:
    """Sharded and wired by torchtitan itself, with its experts and ours, against fp64."""
    set_spmd_backend(backend)
    parallel_dims.device_type = "cpu"  # torchtitan takes a machine without a GPU for one with
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2, world_size=2, spmd_backend=backend
    )
    dims.build_mesh()
    weights = titan.stock_and_ours(override)[0]
    x, scores, ids, dout = tokens_of_every_rank(routing)
    exact = mine(in_fp64(weights, x, scores, ids, dout), rank)
    exact |= {name: exact[name][2 * rank : 2 * rank + 2] for name in titan.NAMES}
    found = []
    for name in (None, override):
        moe = moe_config(name).build()
        moe.routed_experts.load_state_dict(weights.state_dict())
        moe.parallelize(dims)
        with get_spmd_context(parallel_dims=dims)():
            given = x[rank], scores[rank], ids[rank], dout[rank]
            found.append(step(moe.routed_experts, *given, local))
    titan.within_budget(found[1], found[0], exact, tokens=2 * TOKENS)


def moe_config(override: str | None) -> MoE.Config:
    """As a model of torchtitan is made: the sharding first, then the overrides."""
    gate = Linear.Config(in_features=titan.D, out_features=titan.EXPERTS, bias=False)
    config = MoE.Config(
        num_experts=titan.EXPERTS,
        routed_experts=titan.layer_config(),
        router=TokenChoiceTopKRouter.Config(
            num_experts=titan.EXPERTS, gate=gate, top_k=titan.TOP_K
        ),
    )
    layout = {"w1_EFD": spmd_types.S(1), "w2_EDF": spmd_types.S(2), "w3_EFD": spmd_types.S(1)}
    set_moe_sharding_config(config, enable_ep=True, enable_sp=True, expert_param_layout=layout)
    return config if override is None else titan.overridden(config, override)


def fully_sharded(rank: int, override: str) -> None:
    """fp32 in shards, bf16 in the layer: gradients are the mean over the ranks."""
    set_spmd_backend("partial_dtensor")
    stock, ours = titan.stock_and_ours(override)
    x, scores, ids, dout = tokens_of_every_rank("any")
    exact = mine(in_fp64(stock, x, scores, ids, dout), rank)
    exact |= {name: exact[name] / 2 for name in titan.NAMES}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for layer in (stock, ours):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        given = x[rank], scores[rank], ids[rank], dout[rank]
        found.append(step(layer, *given, whole))
    titan.within_budget(found[1], found[0], exact, tokens=2 * TOKENS)
