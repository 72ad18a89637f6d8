"""What each rank does in test_expert_parallel.py."""

import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from helpers import Case, make_inputs, ours, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sonicmoe import ActivationType, MoE
from sonicmoe.distributed import dispatch, experts, parallelize
from sonicmoe.distributed.plan import Traffic
from sonicmoe.routing import Router, Routing


def mine(rank: int, tokens: list[int]) -> slice:
    """This rank's tokens among those of all ranks."""
    return slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))


def whole(t):
    """A DTensor put together; anything else as it is."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def close(got, want):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def experts_equal_one_process(rank: int, case: Case, tokens: list[int]) -> None:
    """Forward and every gradient, each rank with its own tokens and its own experts."""
    given = make_inputs(case)
    given.scores = given.scores.double()
    want = run(ours(case, None), given)
    t = mine(rank, tokens)
    per_rank = case.problem.E // len(tokens)
    e = slice(rank * per_rank, (rank + 1) * per_rank)
    local = replace(given, **{n: getattr(given, n)[t] for n in ("x", "ids", "scores", "dout")})
    local = replace(local, **{
        n: w[e] for n in ("w1", "w2", "b1", "b2") if (w := getattr(given, n)) is not None
    })  # fmt: skip
    got = run(partial(experts, group=dist.group.WORLD, **case.options), local)
    by_expert = {"dw1", "dw2", "db1", "db2"}
    close(got, {name: g[e if name in by_expert else t] for name, g in want.items()})


def a_token_goes_to_a_rank_once(rank: int, case: Case) -> None:
    """Rows are the distinct (token, rank), pairs the (token, expert) that exist; nothing else."""
    given, ranks = make_inputs(case), dist.get_world_size()
    per_rank = case.problem.E // ranks
    arrived, plan = dispatch(given.x, given.ids, given.scores, per_rank, dist.group.WORLD)
    here = [
        (t, k, int(i)) for t, row in enumerate(given.ids) for k, i in enumerate(row)
        if 0 <= i < case.problem.E
    ]  # fmt: skip
    for r in range(ranks):
        there = [(t, k, i) for t, k, i in here if i // per_rank == r]
        assert plan.rows.sends[r] == len({t for t, _, _ in there})
        assert plan.pairs.sends[r] == len(there)
        if r != rank:
            continue
        # Every rank sends the same tokens, so what arrives is `ranks` copies of one list.
        token = torch.tensor([t for t, _, _ in there] * ranks, dtype=torch.long)
        assert torch.equal(arrived.rows[arrived.pair_row], given.x[token])
        assert arrived.ids.tolist() == [i % per_rank for _, _, i in there] * ranks
        scores = [given.scores[t, k] for t, k, _ in there] * ranks
        assert arrived.scores.tolist() == [float(s) for s in scores]
        assert all(a <= b for a, b in pairwise(arrived.pair_row.tolist()))


def nothing_of_size_h_is_kept_but_the_rows(rank: int, case: Case) -> None:
    given, saved = make_inputs(case), []
    for t in (given.x, given.scores, given.w1, given.w2):
        t.requires_grad_()
    weights = (given.w1, given.w2)

    def keep(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        experts(given.x, given.ids, given.scores, *weights, group=dist.group.WORLD)
    kept = [t for t in saved if t.is_floating_point() and all(t is not w for w in weights)]
    p, (rows, *of_pairs) = case.problem, kept
    assert rows.shape[1:] == (p.H,)
    shapes = {tuple(t.shape) for t in of_pairs}
    pairs = len(of_pairs[0])
    assert len(of_pairs) == 2 and shapes == {(pairs, p.N), (pairs,)}


class Tempered(Router):
    """A user's router, with parameters whose gradients depend on a rank's tokens.

    That of a sum is one tensor for both terms.
    """

    def __init__(self, num_experts, k):
        super().__init__(num_experts, k)
        self.temperature = torch.nn.Parameter(torch.tensor([1.5]))
        self.warmer = torch.nn.Parameter(torch.tensor([0.5]))

    def forward(self, logits, *, backend=None):
        scores, ids = (logits / (self.temperature + self.warmer)).softmax(-1).topk(self.k)
        return Routing(logits, ids, scores)


def _layer(**options) -> MoE:
    return MoE(8, 3, 16, 8, add_bias=True, **options).double()


def _step(moe, x):
    """A weighted sum of the output, so that every element counts differently; and the losses."""
    x = x.detach().requires_grad_()
    out, aux = moe(x)
    ((out * _upstream(out)).sum() + aux).backward()
    return {"out": out.detach(), "aux": aux.detach(), "dx": x.grad}


def _upstream(out):
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)


def _gradients(moe):
    return {name: whole(p.grad) for name, p in moe.named_parameters()}


def layer_equals_one_process(rank: int, tokens: list[int], options: dict) -> None:
    one = _layer(**options)
    many = parallelize(copy.deepcopy(one), init_device_mesh("cpu", (len(tokens),)))
    x = torch.randn(sum(tokens), 16, dtype=torch.double)
    want = [_step(one, x[mine(r, tokens)]) for r in range(len(tokens))]
    close(_step(many, x[mine(rank, tokens)]), want[rank])
    close(_gradients(many), _gradients(one))


def fp8_layer(rank: int, tokens: list[int]) -> None:
    """What one process computes in FP8, but for the order of sums and a rounding to bf16.

    The scales of weight gradients depend on all rows of an expert, so one process takes all tokens.
    """
    one = MoE(8, 3, 32, 16, dtype=torch.bfloat16, precision="fp8")
    many = parallelize(copy.deepcopy(one), init_device_mesh("cpu", (len(tokens),)))
    x = torch.randn(sum(tokens), 32).bfloat16()
    want = [_step(one, x[mine(r, tokens)]) for r in range(len(tokens))]
    got = _step(many, x[mine(rank, tokens)])
    for name, t in want[rank].items():
        assert (got[name] - t).norm() <= 0.01 * t.norm(), name
    wanted, gradients = _gradients(one), _gradients(many)
    out, _ = one(x)
    of_experts = ("c_fc.weight", "c_proj.weight")
    upstream = torch.cat([_upstream(out[mine(r, tokens)]) for r in range(len(tokens))])
    leaves = [one.get_parameter(name) for name in of_experts]
    wanted |= dict(zip(of_experts, torch.autograd.grad(out, leaves, upstream), strict=True))
    for name, t in wanted.items():
        assert (gradients[name] - t).norm() <= 0.01 * t.norm(), name


def kept_fp8_weights(rank: int, sharded: bool) -> None:
    """Each step of the optimizer quantizes this rank's experts once, unless FSDP2 gathers them."""
    found = []
    for cached in (True, False):
        torch.manual_seed(0)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "precision": "fp8"}
        one = MoE(8, 3, 32, 16, cache_fp8_weights=cached, **options)
        names = ("data", "expert")
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=names)
        many = parallelize(one, mesh["expert"])
        if sharded:
            fully_shard(many, mesh=mesh["data"])
        x = torch.randn(7, 32).bfloat16()
        optimizer = torch.optim.AdamW(many.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            _step(many, x)
            optimizer.step()
        found.append(_step(many, x)["out"])
        state = {name: 2 * t for name, t in many.state_dict().items()}
        many.load_state_dict(state)
        found.append(_step(many, x)["out"])
        if cached:
            assert many._fp8_weights is not None
            assert many._fp8_weights.is_kept == (not sharded)
    for kept, want in zip(found[:2], found[2:], strict=True):
        assert torch.equal(kept, want)
    assert not torch.equal(found[0], found[1])


def kept_fp8_weights_that_are_stale(rank: int) -> None:
    moe = MoE(8, 3, 32, 16, dtype=torch.bfloat16, precision="fp8", cache_fp8_weights=True)
    many = parallelize(moe, init_device_mesh("cpu", (dist.get_world_size(),)))
    x = torch.randn(7, 32).bfloat16()
    many(x)
    cast(Any, many.c_proj.weight).to_local().data.mul_(2)
    message = _message(lambda: many(x))
    assert message.startswith("c_proj.weight: expected the values it had"), message
    many.refresh_fp8_weights()
    before = many(x)[0]
    with torch.no_grad():
        many.c_proj.weight.mul_(2)  # its local tensor's version counter stands still
    assert torch.equal(many(x)[0], 2 * before)


def layer_with_fsdp_on_the_other_dimension(rank, tokens, options):
    """A mesh of 2 × 2: gradients are the mean over all four ranks, and a step keeps them equal."""
    one = _layer(**options)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    many = parallelize(copy.deepcopy(one), mesh["expert"])
    fully_shard(many, mesh=mesh["data"])
    many.set_gradient_divide_factor(4)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (one, many)]
    x = torch.randn(sum(tokens), 16, dtype=torch.double)
    for _ in range(2):
        want = [_step(one, x[mine(r, tokens)]) for r in range(4)]
        close(_step(many, x[mine(rank, tokens)]), want[rank])
        close({n: 4 * g for n, g in _gradients(many).items()}, _gradients(one))
        for p in one.parameters():
            p.grad /= 4
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9) for m in (one, many)]
        torch.testing.assert_close(whole(norms[1]), norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def checkpointed_layer(rank: int, tokens: list[int]) -> None:
    """Rows are sent to the experts again in the backward pass, but not back."""
    from torch.utils.checkpoint import checkpoint

    plain = parallelize(_layer(), init_device_mesh("cpu", (len(tokens),)))
    kept = copy.deepcopy(plain)
    x = torch.randn(sum(tokens), 16, dtype=torch.double)[mine(rank, tokens)]
    with patch.object(Traffic, "back", autospec=True, side_effect=Traffic.back) as back:
        want = _step(plain, x)
        once = back.call_count
        close(_step(lambda x: checkpoint(kept, x, use_reentrant=False), x), want)
    assert once == 3 and back.call_count == 2 * once
    close(_gradients(kept), _gradients(plain))


def frozen_layer(rank: int, tokens: list[int]) -> None:
    """Only x has a gradient: no rank waits for an exchange that another leaves out."""
    one = _layer().requires_grad_(False)
    many = parallelize(copy.deepcopy(one), init_device_mesh("cpu", (len(tokens),)))
    x = torch.randn(sum(tokens), 16, dtype=torch.double)[mine(rank, tokens)]
    close(_step(many, x), _step(one, x))


def group_instead_of_a_mesh(rank: int, tokens: list[int]) -> None:
    one = _layer()
    many = parallelize(copy.deepcopy(one), dist.new_group([0, 1]))
    x = torch.randn(sum(tokens), 16, dtype=torch.double)
    want = [_step(one, x[mine(r, tokens)]) for r in range(2)]
    close(_step(many, x[mine(rank, tokens)]), want[rank])
    close(_gradients(many), _gradients(one))


def bad_arguments(rank: int) -> None:
    import pytest

    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="divides the 3 experts"):
        parallelize(MoE(3, 1, 16, 8), mesh)
    with pytest.raises(ValueError, match="Call it once"):
        parallelize(parallelize(_layer(), mesh), mesh)
    with pytest.raises(ValueError, match="a DeviceMesh or a ProcessGroup, got int"):
        parallelize(_layer(), cast(Any, 2))
    with pytest.raises(ValueError, match="one dimension"):
        parallelize(_layer(), init_device_mesh("cpu", (2, 1)))


def _arguments(tokens=6, experts=2, hidden=16, intermediate=8, dtype=torch.float32, **changes):
    """Of `experts` for one of two ranks."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "x": new(tokens, hidden),
        "ids": torch.randint(4, (tokens, 2), generator=generator),
        "scores": torch.rand(tokens, 2, generator=generator),
        "w1": new(experts, 2 * intermediate, hidden),
        "w2": new(experts, hidden, intermediate),
    } | changes


def _message(call) -> str:
    """What the error of `call` says; afterwards the group still works."""
    try:
        call()
    except ValueError as error:
        experts(**_arguments())
        return str(error)
    raise AssertionError("no error")


def _b1() -> dict:
    return {"b1": torch.zeros(2, 16)}


def _trained(*names: str) -> dict:
    return {name: t.requires_grad_() for name, t in _arguments().items() if name in names}


DIFFERENT = {
    "experts_per_rank": (lambda: _arguments(experts=4), "2 on rank 0, 4 on rank 1"),
    "hidden_size": (lambda: _arguments(hidden=24), "16 on rank 0, 24 on rank 1"),
    "x_dtype": (lambda: _arguments(dtype=torch.bfloat16), "torch.bfloat16 on rank 1"),
    "scores_dtype": (lambda: _arguments(scores=torch.rand(6, 2).double()), "float64 on rank 1"),
    "intermediate_size": (lambda: _arguments(intermediate=16), "8 on rank 0, 16 on rank 1"),
    "activation": (lambda: _arguments(activation=ActivationType.GEGLU), "GEGLU on rank 1"),
    "gate_up": (lambda: _arguments(gate_up="concatenated"), "concatenated on rank 1"),
    "has_b1": (lambda: _arguments(**_b1()), "False on rank 0, True on rank 1"),
    "x_requires_grad": (lambda: _arguments(**_trained("x")), "False on rank 0, True on rank 1"),
    "scores_requires_grad": (lambda: _arguments(**_trained("scores")), "True on rank 1"),
    "output_requires_grad": (lambda: _arguments(**_trained("w1")), "True on rank 1"),
}


def ranks_that_differ(rank: int, setting: str) -> str:
    arguments = DIFFERENT[setting][0]() if rank else _arguments()
    return _message(lambda: experts(**arguments))


def precisions_that_differ(rank: int) -> str:
    arguments = _arguments(intermediate=16, dtype=torch.bfloat16)
    return _message(lambda: experts(**arguments, precision="fp8" if rank else None))


def dispatches_that_differ(rank: int) -> str:
    given = _arguments(hidden=16 + 8 * rank)
    return _message(lambda: dispatch(given["x"], given["ids"], given["scores"], 2))


def _main_grad():
    w1 = torch.nn.Parameter(torch.zeros(2, 16, 16))
    w1.main_grad = torch.zeros(2, 16, 8)
    return {"w1": w1}


_pairs = torch.arange(6)
_of_pairs = {"ids": torch.zeros(6, dtype=torch.long), "scores": torch.rand(6)}
WRONG = {
    "x": lambda: {"x": torch.randn(6, 24)},
    "ids": lambda: {"ids": torch.zeros(6, 2)},
    "scores": lambda: {"scores": torch.rand(6, 3)},
    "w1": lambda: {"w1": torch.randn(2, 32, 16)},
    "slot_token": lambda: {**_of_pairs, "slot_token": _pairs[:5]},
    "token_start": lambda: {**_of_pairs, "slot_token": _pairs, "token_start": _pairs},
    "token_start of": lambda: {"token_start": torch.arange(0, 14, 2)},
    "backend": lambda: {"backend": "cuda"},
    "main_grad": _main_grad,
}


def wrong_on_one_rank(rank: int, argument: str) -> str:
    arguments = _arguments() | (WRONG[argument]() if rank else {})
    return _message(lambda: experts(**arguments))


def dispatch_wrong_on_one_rank(rank: int, per_rank) -> str:
    given = _arguments()
    per_rank = per_rank if rank else 2
    return _message(lambda: dispatch(given["x"], given["ids"], given["scores"], per_rank))


def layer_wrong_on_one_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    moe = parallelize(MoE(4, 2, 16, 8), init_device_mesh("cpu", (2,)))
    x = torch.zeros(shape, dtype=dtype) if rank else torch.zeros(6, 16)
    try:
        moe(x)
    except (ValueError, RuntimeError) as error:
        moe(torch.zeros(6, 16))
        return str(error)
    raise AssertionError("no error")


def headers_cost_no_collective(rank: int) -> None:
    """Five exchanges forward and three backward, as without the comparison of settings."""
    with patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single) as exchange:
        out = experts(**_arguments(**_trained("x", "scores", "w1", "w2")))
        assert exchange.call_count == 5
        out.sum().backward()
        assert exchange.call_count == 8


def router_with_a_hook(rank):
    """A router whose gradients would not be summed over the ranks is refused on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    moe = parallelize(MoE(4, 2, 16, 8), mesh)
    moe.router.register_forward_hook(lambda *_: None)
    try:
        moe(torch.randn(5, 16))
    except ValueError as error:
        return str(error)
    return "no error"


def global_hook_on_the_router(rank: int, tokens: list[int]) -> None:
    """It fires on every rank, and gradients are still summed over the ranks."""
    from torch.nn.modules.module import register_module_forward_hook

    one = _layer(fp32_router_logits=True)
    many = parallelize(copy.deepcopy(one), init_device_mesh("cpu", (len(tokens),)))
    x, seen = torch.randn(sum(tokens), 16, dtype=torch.double), []
    want = [_step(one, x[mine(r, tokens)]) for r in range(len(tokens))]
    hook = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        close(_step(many, x[mine(rank, tokens)]), want[rank])
    finally:
        hook.remove()
    close(_gradients(many), _gradients(one))
    assert many.router in seen
