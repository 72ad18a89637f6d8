"""`MoE(router=…)`: one argument, the same layer behind it."""

import copy
from dataclasses import replace

import pytest
import torch
from research.memory import saved_bytes

import sonicmoe
from sonicmoe import MoE, experts, ops
from sonicmoe.reference import layer as reference
from sonicmoe.routing import ROUTERS, Sigmoid, TokenRounding, TopK, route, statistics

SHAPE = (5, 2, 16, 8)  # E, K, H, I


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_every_router_gives_the_reference(name, mode):
    """The choice as a dense (T, E) matrix of weights, in fp64, differentiated by autograd."""
    small = TokenRounding(5, 2, tile=8) if name == "token_rounding" else name
    moe = MoE(*SHAPE, router=small, add_bias=True, z_loss_coef=0.1).double().train(mode)
    torch.nn.init.normal_(moe.c_fc.bias)
    x = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    twin = copy.deepcopy(moe)
    out, aux = moe(x)

    y = x.detach().clone().requires_grad_()
    r = twin.routing(twin.router(y))
    token = torch.arange(40).repeat_interleave(2) if r.slot_token is None else r.slot_token
    used = r.ids.flatten() >= 0
    place = (token[used].long(), r.ids.flatten()[used].long())
    weight = torch.zeros(40, 5, dtype=torch.float64).index_put(place, r.scores.flatten()[used])
    every = torch.where(weight != 0, torch.arange(5), -1)
    want = reference.experts(
        y, every, weight, twin.c_fc.weight, twin.c_proj.weight, twin.c_fc.bias, twin.c_proj.bias
    )
    torch.testing.assert_close(out, want)

    upstream = torch.randn_like(out)
    grads = torch.autograd.grad((out * upstream).sum(), [x, *moe.parameters()])
    exact = torch.autograd.grad((want * upstream).sum(), [y, *twin.parameters()])
    for got, true in zip(grads, exact, strict=True):
        torch.testing.assert_close(got, true)
    assert aux.isfinite()


@pytest.mark.parametrize("name", ROUTERS)
def test_state_dict_has_the_published_keys(name):
    published = {"router.weight", "c_fc.weight", "c_proj.weight"}
    extra = {"routing.selection_bias"} if name == "sigmoid" else set()
    assert set(MoE(*SHAPE, router=name).state_dict()) == published | extra


def test_a_router_with_options():
    moe = MoE(*SHAPE, router=Sigmoid(5, 2, scale=2.0))
    assert moe.routing.scale == 2.0 and "router=Sigmoid" in repr(moe)
    with pytest.raises(ValueError, match="router: expected a router for 5 experts and k = 2"):
        MoE(*SHAPE, router=Sigmoid(6, 2))


def test_a_sigmoid_belongs_to_one_layer():
    """Its bias and load are those of one layer; the others have no state and may be shared."""
    router = Sigmoid(5, 2)
    moe, other = MoE(*SHAPE, router=router), MoE(*SHAPE)
    match = "router: expected a Sigmoid of its own, got that of another layer"
    with pytest.raises(ValueError, match=match):
        MoE(*SHAPE, router=router)
    with pytest.raises(ValueError, match=match):
        other.routing = router
    moe.routing = router
    twin = copy.deepcopy(moe)
    with pytest.raises(ValueError, match=match):
        other.routing = twin.routing
    shallow = copy.copy(moe)
    assert shallow.routing is moe.routing is router
    other.routing = copy.deepcopy(router)
    moe.routing = Sigmoid(5, 2)
    third = MoE(*SHAPE, router=router)  # which has no other layer any more
    assert third.routing is router
    shared = TopK(5, 2)
    assert MoE(*SHAPE, router=shared).routing is MoE(*SHAPE, router=shared).routing


def test_a_hook_sees_what_the_router_decides():
    moe, seen = MoE(*SHAPE, router=TokenRounding(5, 2, tile=8)), []
    moe.routing.register_forward_hook(lambda module, args, r: seen.append(statistics(r, 8)))
    moe(torch.randn(40, 16))
    assert (seen[0].rows % 8 == 0).all() and seen[0].padding_after == 0


@pytest.mark.parametrize("router", [TopK(5, 2), TokenRounding(5, 2, tile=8)], ids=repr)
def test_what_a_hook_returns_is_checked(router):
    """Of a router of ours, whose own results need no check; `watch` only reads them."""
    moe, x = MoE(*SHAPE, router=router), torch.randn(40, 16)
    watch = sonicmoe.watch(moe)
    assert moe.routing._is_trusted()
    moe.routing.register_forward_hook(lambda module, args, r: replace(r, ids=r.ids[:-1]))
    with pytest.raises(ValueError, match=f"^router {type(router).__name__}, in the Routing that"):
        moe(x)
    with pytest.raises(ValueError, match=f"^router {type(router).__name__}, in the Routing that"):
        route(torch.randn(40, 5), 2, moe.routing)
    watch.close()


def test_slots_that_a_hook_moves_to_other_tokens_are_refused():
    moe = MoE(*SHAPE, router=TokenRounding(5, 2, tile=8))
    moe.routing.register_forward_hook(lambda module, args, r: replace(
        r, token_start=r.token_start.flip(0)))  # fmt: skip
    with pytest.raises(ValueError, match="token_start"):
        moe(torch.randn(40, 16))


def test_aux_loss_counts_the_choice_of_the_global_batch():
    """Rounding changes no balance loss; the hook gets the rank's counts."""
    got = []

    def all_reduce(counts):
        got.append(counts)
        return counts + 1

    moe = MoE(*SHAPE, router=TokenRounding(5, 2, tile=8), all_reduce_counts=all_reduce)
    x = torch.randn(40, 16)
    _, aux = moe(x)
    _, plain = moe.eval()(x)
    torch.testing.assert_close(aux, plain)
    assert got[0].sum() == 80 and torch.equal(got[0], got[1])


def test_no_coefficient_no_loss(monkeypatch):
    """Nothing is computed or kept for it, but its dtype and device are those of a loss."""
    moe, x = MoE(*SHAPE), torch.randn(40, 16)
    held, _ = saved_bytes(lambda: moe(x)[0], [*moe.parameters()])
    loss = moe(x)[1]
    moe.aux_loss_coef = 0.0
    monkeypatch.setattr(ops, "balance", None)
    zero = moe(x)[1]
    assert zero == 0 and zero.dtype == loss.dtype and zero.shape == loss.shape
    without, _ = saved_bytes(lambda: moe(x)[0], [*moe.parameters()])
    assert held - without == 4 * (40 * 5 + 5)  # the logits, and their slope
    moe.z_loss_coef = 0.1
    with pytest.raises(TypeError):
        moe(x)


@pytest.mark.parametrize("name", ["sigmoid", "expert_choice", "token_rounding"])
def test_layer_compiled_without_a_graph_break(name):
    torch._dynamo.reset()
    small = TokenRounding(5, 2, tile=8, subroutine="sr-f") if name == "token_rounding" else name
    moe = MoE(*SHAPE, router=small)
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (24, 40):
        x = torch.randn(tokens, 16, requires_grad=True)
        found = []
        for layer in (moe, compiled):
            torch.manual_seed(0)
            out, aux = layer(x)
            grads = torch.autograd.grad(out.square().sum() + aux, [x, *moe.parameters()])
            found.append([out, aux, *grads])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_fewer_tokens_than_a_tile(name, tokens):
    """Token rounding then gives every expert none: zeros, and a graph that is connected."""
    moe = MoE(*SHAPE, router=name)
    x = torch.randn(tokens, 16, requires_grad=True)
    out, aux = moe(x)
    (out.sum() + aux).backward()
    assert out.shape == x.shape and x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in moe.parameters())
    if name == "token_rounding":
        assert (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_in_16_bits(dtype):
    moe = MoE(*SHAPE, router="sigmoid", fp32_router_logits=True).to(dtype)
    out, aux = moe(torch.randn(12, 16, dtype=dtype))
    (out.float().sum() + aux).backward()
    assert out.dtype == dtype and moe.routing.selection_bias.dtype == torch.float32


def test_experts_on_a_list_of_pairs():
    """The pairs of a (T, K) choice as a list give the same layer, with and without token_start."""
    x, w1, w2 = torch.randn(9, 16), torch.randn(5, 16, 16), torch.randn(5, 16, 8)
    r = route(torch.randn(9, 5), 2)
    want = experts(x, r.ids, r.scores, w1, w2)
    pairs = (r.ids.flatten(), r.scores.flatten())
    token = torch.arange(9, dtype=torch.int32).repeat_interleave(2)
    start = torch.arange(0, 19, 2, dtype=torch.int32)
    for token_start in (None, start):
        got = experts(x, *pairs, w1, w2, slot_token=token, token_start=token_start)
        torch.testing.assert_close(got, want)
    for wrong in (
        {"slot_token": token[:3]},
        {"slot_token": token.float()},
        {"slot_token": token, "token_start": start[1:]},
    ):
        with pytest.raises(ValueError, match=list(wrong)[-1]):
            experts(x, *pairs, w1, w2, **wrong)
    with pytest.raises(ValueError, match="ids"):
        experts(x, r.ids, r.scores, w1, w2, slot_token=token)
