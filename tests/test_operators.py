"""Every operator of torch.ops.sonicmoe: schema, fake version, FLOPs, compilation."""

import pytest
import torch
import torch._dynamo.testing
from helpers import Case, make_inputs
from operator_calls import CASE, operator_calls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import sonicmoe
from sonicmoe import ActivationType, MoE, ops


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_whoever_listens_hears_the_operators():
    logits = torch.randn(12, 4)
    want = ops.topk(logits, 2, True, "torch")[0]
    with _Seen() as seen:
        by_mode = ops.topk(logits, 2, True, "torch")[0]
    assert "sonicmoe.topk.default" in seen.names
    with torch.profiler.profile() as profile:
        by_profiler = ops.topk(logits, 2, True, "torch")[0]
    assert "sonicmoe::topk" in {event.key for event in profile.key_averages()}
    assert torch.equal(by_mode, want) and torch.equal(by_profiler, want)
    fake = FakeTensorMode().from_tensor(logits)
    assert isinstance(ops.topk(fake, 2, True, "torch")[0], FakeTensor)


ARGUMENTS = operator_calls()
CALLS = [(name, i) for name, calls in ARGUMENTS.items() for i in range(len(calls))]


def test_every_operator_is_tested():
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("sonicmoe::")
    }
    same_function = {"down_backward_into", "up_backward_into"}
    assert registered - same_function == {name for name, f in vars(ops).items() if callable(f)}
    assert len(registered) <= 25
    assert registered == set(ARGUMENTS)


@pytest.fixture
def allclose_of_fp8(monkeypatch):
    """PyTorch's allclose, which opcheck calls, does not take e4m3."""
    allclose = torch.allclose

    def of_fp8(a, b, **options):
        return allclose(a.float(), b.float(), **options)

    monkeypatch.setattr(
        torch,
        "allclose",
        lambda a, *rest, **k: (of_fp8 if a.itemsize == 1 else allclose)(a, *rest, **k),
    )


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_opcheck(name, call, allclose_of_fp8):
    """Schema, no hidden mutation or alias, and a fake version with the right shapes and strides."""
    tests = ["test_schema", "test_faketensor"]
    if call == 0:
        tests.append("test_aot_dispatch_dynamic")
    overload = getattr(torch.ops.sonicmoe, name).default
    torch.library.opcheck(overload, ARGUMENTS[name][call], test_utils=tests)


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_fakes_of_gpu_tensors_need_no_gpu(name, call):
    def on_gpu(argument):
        if not isinstance(argument, torch.Tensor):
            return argument
        shape, stride, dtype = argument.shape, argument.stride(), argument.dtype
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda:0")

    with FakeTensorMode():
        out = getattr(torch.ops.sonicmoe, name)(*map(on_gpu, ARGUMENTS[name][call]))
    for result in out if isinstance(out, tuple) else (out,) if out is not None else ():
        assert isinstance(result, FakeTensor)
        assert result.device == torch.device("cuda:0")


@pytest.mark.parametrize("activation", [ActivationType.SWIGLU, ActivationType.RELU])
def test_flops_are_counted(activation):
    """6RHI forward and 12RHI backward for gated activations, 4 and 8 for plain ones."""
    case = Case("12,16,8,4,2", torch.float32, activation, routing="uniform")
    given, unit = make_inputs(case).arguments(), 24 * 16 * 8
    for name in ("x", "scores", "w1", "w2"):
        given[name].requires_grad_()
    forward, backward = (6, 12) if activation.is_gated else (4, 8)
    with FlopCounterMode(display=False) as counted:
        out = sonicmoe.experts(**given, activation=activation)
    assert counted.get_total_flops() == forward * unit
    with FlopCounterMode(display=False) as counted:
        out.sum().backward()
    assert counted.get_total_flops() == backward * unit


def test_flops_of_frozen_weights_are_not_counted():
    given, unit = make_inputs(CASE).arguments(), 24 * 16 * 8
    given["x"].requires_grad_()
    out = sonicmoe.experts(**given)
    with FlopCounterMode(display=False) as counted:
        out.sum().backward()
    assert counted.get_total_flops() == 6 * unit


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.tries("torch.compile", "one graph for any T, every gradient")
def test_compiled_without_a_graph_break(fresh_compiler):
    """One graph for changing numbers of tokens, with the same results and gradients."""
    moe = MoE(4, 2, 16, 8, add_bias=True, router="topk_over_softmax")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for tokens in (12, 20, 7):
        x = torch.randn(tokens, 16, requires_grad=True)
        dout = torch.randn(tokens, 16)
        found = []
        for layer in (moe, compiled):
            out, aux = layer(x)
            grads = torch.autograd.grad((out * dout).sum() + aux, [x, *moe.parameters()])
            found.append([out, aux, *grads])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
        counts.append(counter.frame_count)
    # Twice for the first: PyTorch starts over to make constants of the loss coefficients.
    assert len(set(counts)) == 1, "compiled again for another number of tokens"


def test_compiling_warns_of_nothing_of_ours(fresh_compiler, recwarn):
    """Dynamo warns, once a process, of what it traces through, such as cached functions."""
    torch._dynamo.utils.warn_once_cache.clear()
    moe = MoE(4, 2, 16, 8)
    torch.compile(moe, fullgraph=True, backend="eager")(torch.randn(12, 16))
    assert [str(w.message) for w in recwarn if "sonicmoe" in str(w.message)] == []


@pytest.mark.tries("torch.compile", "each public function")
@pytest.mark.parametrize("entry", ["experts", "grouped", "general"])
def test_compiled_functions(entry, fresh_compiler):
    given = make_inputs(CASE)
    weights = (given.w1.requires_grad_(), given.w2)

    def experts(x):
        return sonicmoe.experts(x, given.ids, given.scores, *weights)

    def grouped(x):
        return sonicmoe.grouped_experts(x, torch.tensor([3, 0, 5, 2]), *weights)

    def general(x):
        token = torch.arange(24) % 12
        views = [w.permute(1, 2, 0) for w in weights]
        return sonicmoe.moe_general_routing_inputs(
            x, given.scores.flatten(), token, given.ids.flatten(), views[0], None, views[1], None, 4
        )[0]

    function = {"experts": experts, "grouped": grouped, "general": general}[entry]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = given.x.requires_grad_()
    for want, got in zip(
        *(_with_gradients(f, x, given.w1) for f in (function, compiled)), strict=True
    ):
        torch.testing.assert_close(got, want)


def _with_gradients(function, x, w1):
    out = function(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, w1])]
