"""What each rank does in test_sharded.py."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expert_parallel import mine, whole
from helpers import make_inputs, run
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import sonicmoe
from sonicmoe import MoE
from sonicmoe.distributed import parallelize


def layer() -> MoE:
    torch.manual_seed(3)
    return MoE(4, 2, 16, 8, add_bias=True)


def loss(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    out, aux = moe(x)
    return out.float().square().sum() + aux.float()


def fully_sharded_in_bf16(rank, tokens):
    """fp32 parameters in shards, bf16 in the layer, gradients averaged in fp32: step by step as one
    process does it by hand."""
    one, many = layer(), layer()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(many, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, many)]
    x = torch.randn(sum(tokens), 16)
    for _ in range(3):
        low = copy.deepcopy(one).bfloat16()
        shards = [x[mine(r, tokens)].bfloat16() for r in range(2)]
        parts = [torch.autograd.grad(loss(low, shard), tuple(low.parameters())) for shard in shards]
        for p, *grads in zip(one.parameters(), *parts, strict=True):
            p.grad = torch.stack(grads).float().mean(0)
        loss(many, x[mine(rank, tokens)]).backward()
        for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
            torch.testing.assert_close(whole(b.grad), a.grad, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def dtensor_weights(rank, case):
    """Each rank has all tokens and some experts; what is not here drops out, outputs are summed."""
    given, mesh = make_inputs(case), init_device_mesh("cpu", (2,))
    want = run(lambda **g: sonicmoe.experts(**g), given)
    per_rank = case.problem.E // 2
    weights = {
        name: torch.nn.Parameter(distribute_tensor(getattr(given, name), mesh, [Shard(0)]))
        for name in ("w1", "w2", "b1", "b2")
    }
    local = given.arguments() | {name: w.to_local() for name, w in weights.items()}
    out = sonicmoe.experts(**local | {"ids": given.ids - rank * per_rank})
    out.backward(given.dout)
    summed = out.detach().clone()
    dist.all_reduce(summed)
    torch.testing.assert_close(summed, want["out"])
    for name, w in weights.items():
        torch.testing.assert_close(whole(w.grad), want[f"d{name}"])
    torch.optim.SGD(weights.values(), lr=1.0).step()
    stepped = given.w1 - want["dw1"]
    torch.testing.assert_close(whole(weights["w1"].detach()), stepped)


def _train(moe: MoE) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2)
    loss(moe, torch.ones(3, 16)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _state(moe: MoE, optimizer: torch.optim.Optimizer) -> dict:
    model, optim = get_state_dict(moe, optimizer)
    return {"model": model, "optim": optim}


def save(rank: int, folder: str) -> None:
    moe = layer()
    fully_shard(moe, mesh=init_device_mesh("cpu", (2,)))
    dcp.save(_state(moe, _train(moe)), checkpoint_id=folder)


def load_with_experts_spread(rank: int, folder: str) -> None:
    """What FSDP2 saved goes into expert-parallel parameters, moments of the optimizer included."""
    one = layer()
    want = _state(one, _train(one))
    moe = parallelize(MoE(4, 2, 16, 8, add_bias=True), init_device_mesh("cpu", (2,)))
    optimizer = _train(moe)
    found = _state(moe, optimizer)
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(moe, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    found = _state(moe, optimizer)
    assert found["model"].keys() == want["model"].keys()
    for name, t in want["model"].items():
        torch.testing.assert_close(whole(found["model"][name]), t)
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                whole(found["optim"]["state"][name][moment]),
                want["optim"]["state"][name][moment],
            )
