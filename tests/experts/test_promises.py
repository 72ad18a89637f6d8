"""What the layer promises: the same bits every time, exact zeros, NaN that stays where it is."""

import socket

import pytest
import torch
import torch.distributed as dist
from devices import on, values_on
from helpers import Case, check_zeros, make_inputs, ours, poisoned, run, same_bits
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import sonicmoe
from sonicmoe import ActivationType, MoE, experts

CASE = Case("40,16,8,5,2", torch.float32, bias=True, routing="dropped")
LARGE = Case("3000,512,256,16,4", bias=True, routing="dropped")
NAN = float("nan")


@values_on(
    "case, times",
    cpu=[(Case("200,32,16,4,3", bias=True), 1)],
    cuda=[
        (Case("8000,512,256,16,4", dtype, bias=True), 5)
        for dtype in (torch.bfloat16, torch.float32)
    ],
)
def test_bitwise_the_same_every_time(case, times, device, backend):
    given = make_inputs(case, device)
    first = run(ours(case, backend), given)
    for _ in range(times):
        same_bits(first, run(ours(case, backend), given))


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


@values_on("case", cpu=[CASE], cuda=[LARGE])
def test_dropped_slots_are_not_read(case, device, backend):
    given = make_inputs(case, device)
    want = run(ours(case, backend), given)
    absent = (given.ids < 0) | (given.ids >= case.problem.E)
    given.scores[absent] = NAN
    given.x[absent.all(-1)] = NAN
    given.dout[absent.all(-1)] = NAN
    got = run(ours(case, backend), given)
    same_bits(want, got)
    check_zeros(got, given)


ROWS, WEIGHTS = ("x", "dout"), ("w1", "w2", "b1", "b2")


@values_on(
    "shape, dtype, where",
    cpu=[("40,16,8,5,1", torch.float32, (name,)) for name in (*ROWS, *WEIGHTS)],
    interpreter=[("40,16,8,3,1", torch.bfloat16, names) for names in (ROWS, WEIGHTS)],
    cuda=[
        ("2000,264,136,7,1", torch.bfloat16, ROWS), ("2000,264,136,7,3", torch.bfloat16, WEIGHTS)
    ],
)  # fmt: skip
def test_nan_of_one_expert_reaches_no_other(shape, dtype, where, device, backend):
    """Of its rows, where each token has one expert, or of its weights."""
    case = Case(shape, dtype, bias=True, routing="uniform")
    clean, dirty = make_inputs(case, device), make_inputs(case, device)
    bad, others = case.problem.E // 2, torch.arange(case.problem.E) != case.problem.E // 2
    # Rows past an expert's end are fetched as token 0, times zero.
    offset = torch.arange(case.problem.K, device=device)
    clean.ids[0] = dirty.ids[0] = (bad + offset) % case.problem.E
    slots = clean.ids == bad
    hit = slots.any(-1)
    for name in where:
        getattr(dirty, name)[hit if name in ROWS else bad] = NAN
    want, got = run(ours(case, backend), clean), run(ours(case, backend), dirty)
    keep = {"out": ~hit, "dx": ~hit, "dscores": ~slots}
    for name in want:
        kept = keep.get(name, others.to(device))
        assert torch.equal(want[name][kept], got[name][kept]), name
    assert got["dx" if where == ("dout",) else "out"][hit].isnan().all()
    if "x" in where:
        assert got["dw1"][bad].isnan().all()


@on("interpreter")
def test_a_clamp_keeps_nan():
    activation = ActivationType.SWIGLU_CLAMPED
    case = Case("40,16,8,3,1", activation=activation, bias=True, routing="uniform")
    given = make_inputs(case)
    hit = given.ids[:, 0] == 1
    given.x[hit] = float("nan")
    got = run(ours(case, "triton"), given)
    assert torch.equal(got["out"].isnan().all(-1), hit)
    assert torch.equal(got["db1"].isnan().all(-1), torch.arange(3) == 1)  # a sum of dZ


@on("cuda")
@pytest.mark.parametrize(
    ("activation", "gate_up"),
    [
        (ActivationType.SWIGLU, "interleaved"),
        (ActivationType.SWIGLU, "concatenated"),
        (ActivationType.GELU, "interleaved"),
    ],
)
def test_without_gradients_the_same_bits_come_out(activation, gate_up):
    """Z is not stored then, which is another kernel."""
    case = Case("1500,520,328,7,2", activation=activation, bias=True, gate_up=gate_up)
    given = make_inputs(case, "cuda").arguments()
    given["w1"].requires_grad_()
    with poisoned():
        kept = experts(**given, **case.options)
    with torch.no_grad(), poisoned():
        passed = experts(**given, **case.options)
    assert kept.requires_grad and not passed.requires_grad
    assert torch.equal(kept, passed)


@on("cuda")
@pytest.mark.parametrize("retain", [False, True])
def test_strides_of_every_kind(retain):
    """Rows of a wider tensor, a gradient of stride 0, and a graph that is walked twice."""
    given = make_inputs(LARGE, "cuda")
    wide = torch.zeros(3000, 1024, device="cuda", dtype=torch.bfloat16)
    wide[:, ::2] = given.x
    strided = given.arguments() | {"x": wide[:, ::2].requires_grad_()}
    dense = given.arguments() | {"x": given.x.requires_grad_()}
    out, same = (experts(**a, activation=LARGE.activation) for a in (strided, dense))
    assert torch.equal(out, same)
    out.sum().backward(retain_graph=True)
    (want,) = torch.autograd.grad(same, dense["x"], torch.ones_like(same))
    assert torch.equal(strided["x"].grad, want)
    if retain:
        (again,) = torch.autograd.grad(out, strided["x"], torch.ones_like(out))
        assert torch.equal(again, want)


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
