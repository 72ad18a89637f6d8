"""`experts`: strides, layouts, which gradients are paid for, autocast, what is kept."""

import inspect
import weakref

import pytest
import torch
from helpers import Case, budget, make_inputs, ours, plain, run, same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import sonicmoe
from sonicmoe import MoE
from sonicmoe.reference import grouped_gemm
from sonicmoe.routing import Sigmoid, TokenRounding, auxiliary_loss

CASE = Case("20,16,8,4,2", torch.float32, bias=True, routing="dropped")


class Calls(TorchDispatchMode):
    """Which of our operators run, with which arguments, and whether their results live on."""

    def __init__(self):
        super().__init__()
        self.made = []
        self.returned = {}

    def of(self, name, **wanted):
        """The arguments of each call of an operator with these values."""
        found = [arguments for operator, arguments in self.made if operator == name]
        return [a for a in found if all(a[key] == value for key, value in wanted.items())]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sonicmoe":
            names = [a.name for a in func._schema.arguments]
            self.made.append((func._opname, dict(zip(names, args, strict=True))))
        out = func(*args, **(kwargs or {}))
        if func.namespace == "sonicmoe":
            every = out if isinstance(out, tuple) else (out,)
            self.returned[func._opname] = [weakref.ref(t) for t in every]
        return out


@pytest.fixture
def stages(monkeypatch):
    """The steps of the backward pass that run, with their arguments."""
    made = []

    def note(name, function):
        signature = inspect.signature(function)

        def noted(*args):
            made.append((name, signature.bind(*args).arguments))
            return function(*args)

        monkeypatch.setattr(grouped_gemm, name, noted)

    for name in ("dx", "dz", "weight_gradient", "bias_gradient"):
        note(name, getattr(grouped_gemm, name))
    return made


# argument -> the step that pays for its gradient
PAID_BY = {
    "x": ("dx", {}),
    "w1": ("weight_gradient", {"gathered": "right"}),
    "b1": ("bias_gradient", {"gathered": False}),
    "w2": ("weight_gradient", {"gathered": "left"}),
    "b2": ("bias_gradient", {"gathered": True}),
    "scores": ("dz", {"dscores": True}),
}


@pytest.mark.parametrize(
    "wanted",
    [("x",), ("w1",), ("b1",), ("w2",), ("b2",), ("scores",), ("x", "w2"), ("x", "scores")],
    ids="+".join,
)
def test_only_wanted_gradients_are_computed(wanted, stages):
    given = make_inputs(CASE)
    everything = run(ours(CASE, None), given)
    given.differentiable = wanted
    stages.clear()
    part = run(ours(CASE, None), given)
    same_bits({name: everything[name] for name in part}, part)

    def runs(step, **flags):
        given = [a | a["needs"]._asdict() if "needs" in a else a for s, a in stages if s == step]
        return any(all(a[key] == value for key, value in flags.items()) for a in given)

    for name, (step, flags) in PAID_BY.items():
        assert runs(step, **flags) == (name in wanted), f"{step} for {wanted}"
    assert runs("dz", dz=True) == bool({"x", "w1", "b1"} & set(wanted))
    assert runs("dz", a=True) == ("w2" in wanted)


def _kept(layer) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer()
    return saved


def test_nothing_is_kept_where_nothing_is_differentiated():
    given = make_inputs(CASE).arguments()
    assert not _kept(lambda: sonicmoe.experts(**given))
    with torch.no_grad():
        leaf = given | {"x": given["x"].requires_grad_()}
        assert not _kept(lambda: sonicmoe.experts(**leaf))


def test_kept_are_x_z_the_weights_and_the_routing():
    """Neither A (R, I) nor Y (R, H) nor gathered rows."""
    given = make_inputs(CASE).arguments()
    leaves = given | {n: given[n].requires_grad_() for n in ("x", "w1", "w2", "b1", "b2", "scores")}
    rows, n, h = 40, 16, 16
    kept = _kept(lambda: sonicmoe.experts(**leaves))
    shapes = [tuple(t.shape) for t in kept if t.is_floating_point()]
    allowed = {(20, h), (rows, n), (20, 2), (4, n, h), (4, h, 8), (4, h), (4, n)}
    assert set(shapes) <= allowed
    assert shapes.count((rows, n)) == 1  # Z


def test_a_and_y_are_gone_after_the_forward_pass(monkeypatch):
    given, made = make_inputs(CASE).arguments(), {}
    given["x"].requires_grad_()

    def note(name, function):
        def noted(*args):
            found = function(*args)
            every = found if type(found) is tuple else (found,)
            made[name] = [weakref.ref(t) for t in every if t is not None]
            return found

        monkeypatch.setattr(grouped_gemm, name, noted)

    for name in ("up", "down"):
        note(name, getattr(grouped_gemm, name))
    out = sonicmoe.experts(**given)
    assert out.grad_fn is not None
    z, a = (result() for result in made["up"])
    (y,) = (result() for result in made["down"])
    assert z is not None and a is None and y is None


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
def test_gradients_lie_as_the_parameters_do(transposed):
    """A parameter stored (E, K, N) and passed as a view gets its gradient without a copy."""
    case = Case("20,16,8,4,2", torch.float32, transposed=transposed)
    given = make_inputs(case)
    stored = {n: getattr(given, n).mT if transposed else getattr(given, n) for n in ("w1", "w2")}
    leaves = {n: t.detach().clone().requires_grad_() for n, t in stored.items()}
    views = {n: t.mT if transposed else t for n, t in leaves.items()}
    with Calls() as calls:
        sonicmoe.experts(**given.arguments() | views).backward(given.dout)
    want = run(ours(case, None), given)
    for name, leaf in leaves.items():
        assert leaf.grad.is_contiguous()
        assert torch.equal(leaf.grad.mT if transposed else leaf.grad, want[f"d{name}"])
    assert calls.of("up")[0]["w_weight_dense"].data_ptr() == leaves["w1"].data_ptr()
    assert calls.of("down")[0]["w_weight_dense"].data_ptr() == leaves["w2"].data_ptr()


def test_strided_inputs():
    given = make_inputs(CASE)
    want = run(ours(CASE, None), given)
    strided = make_inputs(CASE)
    strided.x = torch.stack([given.x, given.x], -1)[..., 0]
    strided.scores = given.scores.T.contiguous().T
    strided.ids = given.ids.T.contiguous().T
    strided.w1 = torch.stack([given.w1, given.w1], -1)[..., 0]  # neither (E, N, K) nor (E, K, N)
    strided.dout = given.dout.T.contiguous().T
    assert not any(t.is_contiguous() for t in (strided.x, strided.w1, strided.dout))
    same_bits(want, run(ours(CASE, None), strided))


def test_upstream_gradient_of_stride_zero():
    given = make_inputs(CASE)
    given.dout = torch.ones_like(given.dout)
    want = run(ours(CASE, None), given)
    given.dout = torch.ones(()).expand_as(given.dout)
    assert given.dout.stride() == (0, 0)
    same_bits(want, run(ours(CASE, None), given))
    x = given.x.detach().requires_grad_()
    sonicmoe.experts(**given.arguments() | {"x": x}).sum().backward()
    assert torch.equal(x.grad, want["dx"])


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("scores_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_choice_in_other_dtypes(ids_dtype, scores_dtype):
    given = make_inputs(CASE)
    given.scores = given.scores.to(torch.bfloat16)  # what every one of these dtypes can hold
    want = run(ours(CASE, None), given)
    given.ids, given.scores = given.ids.to(ids_dtype), given.scores.to(scores_dtype)
    got = run(ours(CASE, None), given)
    assert got["dscores"].dtype == scores_dtype
    assert torch.equal(got["out"], want["out"]) and torch.equal(got["dw1"], want["dw1"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_parameters(dtype):
    given, case = make_inputs(CASE), Case(CASE.shape, dtype, bias=True, routing="dropped")
    with torch.autocast("cpu", dtype):
        got = run(ours(CASE, None), given)
    assert got["out"].dtype == dtype and got["dx"].dtype == got["dw1"].dtype == torch.float32
    exact = run(plain(CASE), given.double())
    low = make_inputs(CASE)
    for name in ("x", "w1", "w2", "b1", "b2", "dout"):
        setattr(low, name, getattr(low, name).to(dtype))
    rough = run(plain(case), low)
    for name in exact:
        budget(got[name], rough[name], exact[name], name=name, dtype=dtype, tokens=20)


def test_rounded_weights_are_kept_once():
    """What is kept under autocast: weights of 16 bits, as without it."""
    given, saved = make_inputs(Case(CASE.shape)).arguments(), []
    given |= {name: given[name].float().requires_grad_() for name in ("w1", "w2")}

    def keep(t):
        saved.append(t)
        return t

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
    ):
        sonicmoe.experts(**given)
    kept = [t for t in saved if t.shape in (given["w1"].shape, given["w2"].shape)]
    assert [t.dtype for t in kept] == [torch.bfloat16] * 2


def test_a_graph_can_be_walked_twice():
    given = make_inputs(CASE).arguments()
    leaves = [given[n].requires_grad_() for n in ("x", "scores", "w1", "w2", "b1", "b2")]
    out = sonicmoe.experts(**given)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, dout)
    same_bits(dict(enumerate(first)), dict(enumerate(second)))


@pytest.mark.parametrize("name", ["x", "scores", "w1"])
def test_second_derivatives_are_refused_not_wrong(name):
    """The gradient from above is a constant here, so autograd alone would return zeros."""
    given = make_inputs(CASE).arguments()
    leaf = given[name].requires_grad_()
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(sonicmoe.experts(**given).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.functional.hessian(
            lambda t: sonicmoe.experts(**given | {name: t}).sum(), leaf.detach()
        )


def test_a_gradient_penalty_is_refused_where_another_term_has_one():
    given = make_inputs(CASE).arguments()
    x = given["x"].requires_grad_()
    loss = sonicmoe.experts(**given).sum() + x.square().sum()
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("node", ["topk", "sigmoid", "rounding", "loss", "layer"])
def test_second_derivatives_of_routers_and_losses_are_refused(node):
    moe, x = MoE(4, 2, 16, 8), torch.randn(12, 16, requires_grad=True)
    logits = torch.randn(12, 4, requires_grad=True)
    function = {
        "topk": lambda: sonicmoe.topk_scores(logits, 2)[0],
        "sigmoid": lambda: Sigmoid(4, 2)(logits).scores,
        "rounding": lambda: TokenRounding(4, 2, tile=2)(logits).scores,
        "loss": lambda: auxiliary_loss(logits, torch.ones(4)),
        "layer": lambda: moe(x)[0],
    }[node]
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(function().sum(), x if node == "layer" else logits, create_graph=True)


def test_forward_mode_is_refused_not_zero():
    given = make_inputs(CASE).arguments()
    with torch.autograd.forward_ad.dual_level():
        given["x"] = torch.autograd.forward_ad.make_dual(given["x"], torch.ones_like(given["x"]))
        with pytest.raises((RuntimeError, NotImplementedError)):
            sonicmoe.experts(**given)


def _as_pairs(given: dict) -> dict:
    tokens, k = given["ids"].shape
    token = torch.arange(tokens, dtype=torch.int32).repeat_interleave(k)
    flat = {name: given[name].flatten() for name in ("ids", "scores")}
    return given | flat | {"slot_token": token}


def test_pairs_of_tokens_that_do_not_exist_drop_out():
    given = make_inputs(CASE).arguments()
    pairs = _as_pairs(given)
    want = sonicmoe.experts(**given)
    for token in (-1, 20, 2**31 - 1):
        more = {
            "ids": torch.zeros(1, dtype=torch.int32),
            "scores": torch.ones(1),
            "slot_token": torch.tensor([token], dtype=torch.int32),
        }
        order = -1 if token < 0 else 1
        wider = {name: torch.cat([pairs[name], t][::order]) for name, t in more.items()}
        assert torch.equal(sonicmoe.experts(**pairs | wider), want)


def test_pairs_out_of_order_are_refused():
    pairs = _as_pairs(make_inputs(CASE).arguments())
    with pytest.raises(ValueError, match="slot_token: expected tokens in ascending order"):
        sonicmoe.experts(**pairs | {"slot_token": pairs["slot_token"].flip(0)})


def test_a_token_start_that_does_not_fit_is_refused():
    pairs = _as_pairs(make_inputs(CASE).arguments())
    start = torch.arange(0, 41, 2, dtype=torch.int32)
    want = sonicmoe.experts(**pairs)
    assert torch.equal(sonicmoe.experts(**pairs, token_start=start), want)
    for wrong in (start + 1, torch.zeros_like(start), start.flip(0), 1000 * start):
        with pytest.raises(ValueError, match="token_start"):
            sonicmoe.experts(**pairs, token_start=wrong)


def test_a_token_start_that_descends_is_refused():
    """Each pair lies in the range of its token, but token 0's reaches over the pairs of token 2."""
    pairs = _as_pairs(make_inputs(Case("3,16,8,4,2", torch.float32)).arguments())
    pairs |= {name: pairs[name][[0, 1, 4, 5]] for name in ("ids", "scores", "slot_token")}
    fits = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    assert torch.equal(sonicmoe.experts(**pairs, token_start=fits), sonicmoe.experts(**pairs))
    with pytest.raises(ValueError, match="token_start: expected slots of token t in"):
        sonicmoe.experts(**pairs, token_start=torch.tensor([0, 4, 2, 4], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["x", "w1", "w2", "b1"])
def test_autocast_takes_floating_point_alone(name, dtype):
    given = make_inputs(CASE).arguments()
    given[name] = given[name].to(dtype)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=f"^{name}: "):
        sonicmoe.experts(**given)


def test_autocast_leaves_float64_alone():
    """As PyTorch's own does: nothing that was float64 is computed in 16 bits."""
    given = make_inputs(CASE).double().arguments()
    want = sonicmoe.experts(**given)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sonicmoe.experts(**given), want)
        with pytest.raises(ValueError, match=r"^w1: expected the dtype of x \(torch.float64\)"):
            sonicmoe.experts(**given | {"w1": given["w1"].float()})
