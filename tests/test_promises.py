"""What the layer promises, where no GPU is needed to see it broken."""

import socket

import pytest
import torch
import torch.distributed as dist
from helpers import Case, check_zeros, make_inputs, ours, run, same_bits
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import sonicmoe
from sonicmoe import MoE

CASE = Case("40,16,8,5,2", torch.float32, bias=True, routing="dropped")
NAN = float("nan")


def test_bitwise_the_same_twice():
    given = make_inputs(Case("200,32,16,4,3", bias=True))
    case = Case("200,32,16,4,3", bias=True)
    same_bits(run(ours(case, None), given), run(ours(case, None), given))


def test_no_token_at_all():
    """A connected graph with gradients of zero: a rank without tokens takes part in every step."""
    moe = MoE(4, 2, 16, 8, add_bias=True)
    x = torch.randn(0, 16, requires_grad=True)
    out, _ = moe(x)
    assert out.shape == (0, 16) and out.requires_grad
    out.sum().backward()
    assert x.grad.shape == (0, 16)
    assert all(p.grad is not None and (p.grad == 0).all() for p in moe.parameters())


@pytest.mark.parametrize("z_loss_coef", [0.0, 0.1])
def test_auxiliary_loss_without_tokens_is_zero(z_loss_coef):
    moe = MoE(4, 2, 16, 8, z_loss_coef=z_loss_coef)
    _, aux = moe(torch.randn(0, 16))
    aux.backward()
    assert aux == 0 and (moe.router.weight.grad == 0).all()


def test_empty_experts_and_dropped_slots_are_exact_zeros():
    for routing in ("empty_experts", "dropped", "all_dropped", "one_expert"):
        case = Case(CASE.shape, torch.float32, bias=True, routing=routing)
        given = make_inputs(case)
        check_zeros(run(ours(case, None), given), given)


def test_dropped_slots_are_not_read():
    given = make_inputs(CASE)
    want = run(ours(CASE, None), given)
    absent = (given.ids < 0) | (given.ids >= 5)
    given.scores[absent] = NAN
    given.x[absent.all(-1)] = NAN
    given.dout[absent.all(-1)] = NAN
    same_bits(want, run(ours(CASE, None), given))


@pytest.mark.parametrize("where", ["x", "dout", "w1", "w2", "b1", "b2"])
def test_nan_of_one_expert_reaches_no_other(where):
    """One expert for each token, so that what is of expert 3 is of no other."""
    case = Case("40,16,8,5,1", torch.float32, bias=True, routing="uniform")
    clean, dirty = make_inputs(case), make_inputs(case)
    hit = clean.ids[:, 0] == 3
    getattr(dirty, where)[hit if where in ("x", "dout") else 3] = NAN
    want, got = run(ours(case, None), clean), run(ours(case, None), dirty)
    others = torch.arange(5) != 3
    for name in want:
        keep = ~hit if name in ("out", "dx", "dscores") else others
        assert torch.equal(want[name][keep], got[name][keep]), name
    assert any(t.isnan().any() for t in got.values())


def test_checkpointing_gives_the_same_gradients():
    given = make_inputs(CASE)

    def kept(*args, **kwargs):
        return checkpoint(ours(CASE, None), *args, use_reentrant=False, **kwargs)

    same_bits(run(ours(CASE, None), given), run(kept, given))


def test_selective_checkpointing_names_the_operators():
    """The up projection is kept, the rest computed again; nothing but that changes."""
    given, ran = make_inputs(CASE), []

    def policy(ctx, op, *args, **kwargs):
        if op is torch.ops.sonicmoe.up.default:
            ran.append(ctx.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def kept(**arguments):
        return checkpoint(
            ours(CASE, None),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
            **arguments,
        )

    same_bits(run(ours(CASE, None), given), run(kept, given))
    assert False in ran


@pytest.fixture
def one_process():
    """A process group of one, which shards and gathers like any other."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _step(moe, x):
    out, aux = moe(x)
    (out.square().sum() + aux).backward()
    grads = {n: p.grad for n, p in moe.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


def test_fully_sharded_parameters(one_process):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    moe, x = MoE(4, 2, 16, 8, add_bias=True), torch.randn(20, 16)
    want = {name: g.clone() for name, g in _step(moe, x).items()}
    moe.zero_grad(set_to_none=True)
    fully_shard(moe, mesh=one_process)
    same_bits(want, _step(moe, x))


def test_dtensor_parameters(one_process):
    """Sharded by expert and taken apart by the caller, as expert parallelism does."""
    from torch.distributed.tensor import Shard, distribute_tensor

    given = make_inputs(CASE)
    want = run(ours(CASE, None), given)
    w1 = torch.nn.Parameter(distribute_tensor(given.w1, one_process, [Shard(0)]))
    out = sonicmoe.experts(**given.arguments() | {"w1": w1.to_local()})
    out.backward(given.dout)
    assert torch.equal(w1.grad.full_tensor(), want["dw1"])
