"""Routers that users write: a class with state, a function, and results that are not a routing."""

import copy
from dataclasses import replace

import pytest
import torch

from sonicmoe import MoE
from sonicmoe.reference import layer as reference
from sonicmoe.routing import Router, Routing, Sigmoid, TopK, route

SHAPE = (6, 2, 16, 8)  # E, K, H, I
TOKENS = 12


class Tempered(Router):
    """Softmax over all experts at a learned temperature; counts its calls."""

    def __init__(self, num_experts, k):
        super().__init__(num_experts, k)
        self.temperature = torch.nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits, *, backend=None):
        self.calls += 1
        shares = (logits / self.temperature).softmax(-1)
        scores, ids = shares.topk(self.k)
        return Routing(logits, ids, scores)

    @torch.no_grad()
    def reset_parameters(self):
        self.temperature.fill_(2.0)
        self.calls.zero_()


def hashed(logits):
    """Token t goes to experts t and t + 1, with equal scores."""
    token = torch.arange(len(logits))
    ids = torch.stack([token, token + 1], 1) % logits.shape[1]
    return Routing(logits, ids, torch.full(ids.shape, 0.5))


@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_a_router_with_a_parameter_trains(coefficient):
    """Output and every gradient are those of autograd through the dense reference, in fp64."""
    moe = MoE(*SHAPE, router=Tempered(6, 2), aux_loss_coef=coefficient).double()
    x = torch.randn(TOKENS, 16, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(TOKENS, 16, dtype=torch.float64)
    out, aux = moe(x)
    got = torch.autograd.grad((out * upstream).sum() + aux, [x, *moe.parameters()])

    logits = moe.router(x)
    r = moe.routing(logits)
    want = reference.experts(x, r.ids, r.scores, moe.c_fc.weight, moe.c_proj.weight)
    share = logits.softmax(-1).sum(0)
    rows = r.ids.flatten().bincount(minlength=6).double()
    balance = coefficient * 6 * (share / share.sum() * rows / rows.sum()).sum()
    wanted = torch.autograd.grad((want * upstream).sum() + balance, [x, *moe.parameters()])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(aux.double(), torch.as_tensor(balance).double())
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_state_is_that_of_the_layer():
    moe = MoE(*SHAPE, router=Tempered(6, 2))
    moe(torch.randn(TOKENS, 16))
    state = moe.state_dict()
    assert state["routing.calls"] == 1 and state["routing.temperature"] == 2
    twin = copy.deepcopy(moe)
    state["routing.temperature"] = torch.tensor([3.0])
    twin.load_state_dict(state)
    assert twin.routing.temperature == 3 and moe.routing.temperature == 2
    empty = MoE(*SHAPE, router=Tempered(6, 2), device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    assert empty.routing.temperature == 2 and empty.routing.calls == 0


@pytest.mark.parametrize("router", [Tempered(6, 2), hashed], ids=["class", "function"])
def test_compiled_in_one_graph(router):
    torch._dynamo.reset()
    moe, x = MoE(*SHAPE, router=router), torch.randn(TOKENS, 16, requires_grad=True)
    found = []
    for layer in (moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
        out, aux = layer(x)
        found.append([out, *torch.autograd.grad(out.square().sum() + aux, [x, moe.c_fc.weight])])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_a_function_routes():
    moe, x = MoE(*SHAPE, router=hashed), torch.randn(TOKENS, 16)
    ids = (torch.arange(TOKENS)[:, None] + torch.arange(2)) % 6
    half = torch.full(ids.shape, 0.5)
    want = reference.experts(x, ids, half, moe.c_fc.weight, moe.c_proj.weight)
    torch.testing.assert_close(moe(x)[0], want)
    assert torch.equal(route(torch.randn(TOKENS, 6), 2, hashed).ids, ids)
    assert moe.router_kind == "hashed" and "router=hashed" in repr(moe)


class Broken(Router):
    """Returns what `change` makes of a valid routing."""

    def __init__(self, change):
        super().__init__(6, 2)
        self.change = change

    def forward(self, logits, *, backend=None):
        scores, ids = logits.softmax(-1).topk(2)
        return self.change(Routing(logits, ids, scores))


def pairs(r, **changes):
    """The same routing as a list of pairs."""
    token = torch.arange(TOKENS).repeat_interleave(2)
    start = torch.arange(0, 2 * TOKENS + 1, 2)
    flat = {"ids": r.ids.flatten(), "scores": r.scores.flatten()}
    return replace(r, **(flat | {"slot_token": token, "token_start": start} | changes))


WRONG = {
    r"a Routing from Broken, got None": lambda r: None,
    r"a Routing from Broken, got a tuple": lambda r: (r.ids, r.scores),
    r"a Routing from Broken, got a Tensor": lambda r: r.ids,
    r"ids from Broken: expected a tensor, got a list": lambda r: replace(r, ids=r.ids.tolist()),
    r"scores from Broken: expected a tensor, got None": lambda r: replace(r, scores=None),
    r"chosen from Broken: expected a tensor or None": lambda r: replace(r, chosen=[1]),
    r"Broken, .*ids: expected \(T, K\) with T = 12": lambda r: replace(r, ids=r.ids[:3]),
    r"Broken, .*scores: expected shape \(T, K\)": lambda r: replace(r, scores=r.scores[:, :1]),
    r"Broken, .*ids: expected int32 or int64": lambda r: replace(r, ids=r.ids.float()),
    r"Broken, .*scores: expected bfloat16": lambda r: replace(r, scores=r.scores.long()),
    r"Broken, .*ids: expected the device of x": lambda r: replace(r, ids=r.ids.to("meta")),
    r"Broken, .*ids: expected 2 dimensions": lambda r: replace(r, ids=r.ids.flatten()),
    r"Broken, .*logits: expected shape \(T, E\)": lambda r: replace(r, logits=r.logits[:, :3]),
    r"Broken, .*chosen: expected shape \(E,\)": lambda r: replace(r, chosen=r.ids[0]),
    r"Broken, .*token_start: expected None without": lambda r: replace(r, token_start=r.ids[0]),
    r"Broken, .*token_start: expected shape \(T\+1,\)": lambda r: pairs(r, token_start=r.ids[0]),
    r"token_start: expected slots of token t in": lambda r: pairs(
        r, token_start=torch.full((TOKENS + 1,), 10**6)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_results_are_refused(message):
    moe = MoE(*SHAPE, router=Broken(WRONG[message]))
    with pytest.raises(ValueError, match=message):
        moe(torch.randn(TOKENS, 16))


def test_pairs_of_an_own_router():
    """With the map of its slots the same routing gives the same output."""
    moe, x = MoE(*SHAPE, router=Broken(lambda r: r)), torch.randn(TOKENS, 16)
    want = moe(x)[0]
    moe.routing = Broken(pairs)
    torch.testing.assert_close(moe(x)[0], want)


def test_what_no_layer_could_call_is_refused():
    class WithoutBackend(Router):
        def forward(self, logits):
            return hashed(logits)

    class WithoutInit(Router):
        def __init__(self):
            torch.nn.Module.__init__(self)

        def forward(self, logits, *, backend=None):
            return hashed(logits)

    class WithoutForward(Router):
        pass

    for router, message in (
        (WithoutBackend(6, 2), r"forward takes \(logits, \*, backend=None\), got WithoutBackend"),
        (WithoutInit(), r"a Router that was initialized, got WithoutInit"),
        (WithoutForward(6, 2), r"a forward of its own, got WithoutForward"),
        (Tempered, r"or a function of the logits, got <class .*pass an object, not its class"),
        (Tempered(5, 2), r"a router for 6 experts and k = 2, got one for 5 and 2"),
        (7, r"router: expected one of softmax_over_topk, .*got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            MoE(*SHAPE, router=router)


def test_results_of_a_subclass_are_checked():
    """Our own routers are trusted; what a user makes of one is not."""

    class Mine(TopK):
        def forward(self, logits, *, backend=None):
            return None

    assert TopK.trusted and Sigmoid.trusted and not Mine.trusted
    with pytest.raises(ValueError, match="a Routing from Mine, got None"):
        MoE(*SHAPE, router=Mine(6, 2))(torch.randn(TOKENS, 16))
    with pytest.raises(ValueError, match="a Routing from Mine, got None"):
        route(torch.randn(TOKENS, 6), 2, Mine(6, 2))
