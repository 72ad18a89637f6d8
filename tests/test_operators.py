"""Every operator of torch.ops.sonicmoe: schema, fake version, FLOPs, compilation."""

import pytest
import torch
from helpers import Case, make_inputs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import sonicmoe
from sonicmoe import ActivationType, MoE, ops
from sonicmoe.functional import permute

CASE = Case("12,16,8,4,2", torch.float32, bias=True, routing="dropped")


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


def _arguments() -> dict[str, list[tuple]]:
    """For every operator, the arguments of at least one call in each of its modes."""
    given, b = make_inputs(CASE), "torch"
    p = permute(given.ids, 4, backend=b)
    logits, start, tiles, m = torch.randn(12, 4), p.expert_start, p.tiles, p.tile_height
    scores, ids = ops.topk(logits, 2, True, b)
    maps = (p.row_token, p.row_slot, p.slot_row)
    gather = (given.x, given.w1, given.b1, p.row_token, start, tiles, m, "swiglu", False)
    z, a = ops.up(*gather, True, b)
    rows = torch.randn(24, 16)
    down_back = (z, given.w2, given.b2, given.scores, *maps, start, tiles, m, "swiglu", False)
    grouped_back = (z, given.w2, None, None, None, None, None, start, tiles, m, "swiglu", True)
    up_back = (given.x, given.w1, p.row_token, p.slot_row, None, start, tiles, m)
    everything, some = (True, True, True, True), (True, False, False, False)
    by_token = torch.arange(12, dtype=torch.int32).repeat_interleave(2)
    ragged = torch.searchsorted(by_token, torch.arange(13, dtype=torch.int32), out_int32=True)
    transposed = given.w1.mT.contiguous().mT
    low, up_factor, down_factor = (torch.randn(n, 8) for n in (24, 4 * 16, 4 * 8))
    up_factor, down_factor = up_factor.view(4, 16, 8), down_factor.view(4, 8, 8)
    schedule = (start, tiles, m)
    return {
        "adapted_up": [
            (given.x, given.w1, given.b1, low, up_factor, p.row_token, *schedule, "swiglu", c, b)
            for c in (False, True)
        ],
        "adapted_product": [
            (a, given.w2, given.b2, low, factor, *schedule, kernel, b)
            for factor, kernel in ((up_factor, "down"), (up_factor.mT.contiguous().mT, "dx"))
        ],
        "transposed": [(logits, 0.5, torch.bfloat16, b), (logits.double(), 2.0, torch.double, b)],
        "adapted_down_backward": [
            (given.dout, z, given.w2, bias, low, down_factor, given.scores, *maps, *schedule,
             "swiglu", False, b)
            for bias in (given.b2, None)
        ],
        "topk": [(logits, 2, True, b), (logits.bfloat16(), 3, False, b)],
        "topk_backward": [(scores, scores, ids, logits, over, b) for over in (True, False)],
        "sigmoid_topk": [
            (logits.bfloat16(), torch.rand(4), 2, 1, 1, True, 2.5, b),
            (logits.double(), torch.rand(4), 1, 2, 1, False, 1.0, b),
        ],
        "sigmoid_topk_backward": [(scores, scores, ids, logits, n, 2.5, b) for n in (True, False)],
        "count": [(given.ids, 4, b), (given.ids[:0], 4, b)],
        "balance": [
            (logits.bfloat16(), p.counts, 0.5, 0.1, b),
            (logits.double(), None, 0.0, 1.0, b),
        ],
        "balance_backward": [(torch.rand(()), torch.rand(4), logits.bfloat16(), 0.1, b)],
        "permute": [
            (given.ids, 4, None, m, b),
            (given.ids.flatten(), 4, by_token, m, b),
            (given.ids[:0], 4, None, m, b),
            (given.ids.repeat(100, 1), 4, None, m, b),  # more than one span
        ],
        "router_gradient_into": [(rows[:12].clone(), logits, torch.rand(4, rows.shape[1]))],
        "round_tokens": [
            (logits.softmax(-1), ids, 3, subroutine, torch.rand(4), b)
            for subroutine in ("nr-f", "nr-s")
        ],
        "round_logits": [
            (logits.to(dtype), ids, normalize, 3, "up", None, b)
            for normalize, dtype in ((False, torch.bfloat16), (True, torch.float64))
        ],
        "round_logits_backward": [
            (torch.rand(24), logits.bfloat16(), chosen, ids.flatten(), ragged, b)
            for chosen in (None, ids)
        ],
        "tiles": [(start, 24, m, b)],
        "up": [
            (*gather, True, b),
            (rows, transposed, None, None, start, tiles, m, "geglu", True, False, b),
            (rows, given.w1, None, None, start, tiles, m, "relu_sq", False, True, b),
        ],
        "down": [
            (a, given.w2, given.b2, None, start, tiles, m, False, b),
            (a, given.w2, None, torch.rand(24), start, tiles, m, True, b),
        ],
        "aggregate": [
            (rows, given.scores, p.slot_row, None, 12, b),
            (rows, None, p.slot_row, ragged, 12, b),
        ],
        "down_backward": [
            (given.dout, *down_back, *everything, False, b),
            (given.dout, *down_back, *some, False, b),
            (rows, *grouped_back, True, True, False, False, True, b),
        ],
        "down_backward_into": [
            (torch.zeros_like(given.w2), given.dout, *down_back, True, True, True, b),
            (torch.zeros_like(given.w2), given.dout, *down_back, False, False, False, b),
        ],
        "up_backward_into": [
            (torch.zeros_like(given.w1), z, *up_back, True, True, b),
            (torch.zeros_like(given.w1), z, *up_back, False, False, b),
        ],
        "up_backward": [
            (z, *up_back, True, True, True, False, b),
            (z, *up_back, False, True, False, False, b),
            (z, rows, transposed, None, None, None, start, tiles, m, True, True, False, True, b),
        ],
    }  # fmt: skip


ARGUMENTS = _arguments()
CALLS = [(name, i) for name, calls in ARGUMENTS.items() for i in range(len(calls))]


def test_every_operator_is_tested():
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("sonicmoe::")
    }
    assert registered == set(ARGUMENTS) == set(ops.__all__)


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_opcheck(name, call):
    """Schema, no hidden mutation or alias, and a fake version with the right shapes and strides."""
    torch.library.opcheck(
        getattr(torch.ops.sonicmoe, name).default,
        ARGUMENTS[name][call],
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_fakes_of_gpu_tensors_allocate_nothing(name, call, monkeypatch):
    """`memory.empty` goes past the dispatcher on a GPU, so no fake version may call it."""

    def allocated(*_):
        raise AssertionError("a fake version allocated memory")

    def on_gpu(argument):
        if not isinstance(argument, torch.Tensor):
            return argument
        shape, stride, dtype = argument.shape, argument.stride(), argument.dtype
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda:0")

    monkeypatch.setattr(ops.memory, "on_current_gpu", allocated)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    with FakeTensorMode():
        out = getattr(ops, name)(*map(on_gpu, ARGUMENTS[name][call]))
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


@pytest.mark.tries("torch.compile", "one graph for changing T, same gradients")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_without_a_graph_break(compiler, fresh_compiler):
    """One graph for changing numbers of tokens, with the same results and gradients."""
    moe = MoE(4, 2, 16, 8, add_bias=True, router="topk_over_softmax")
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend=compiler)
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    counted = torch.compile(moe, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (12, 20, 7):
        x = torch.randn(tokens, 16, requires_grad=True)
        dout = torch.randn(tokens, 16)
        found = []
        for layer in (moe, compiled, counted):
            out, aux = layer(x)
            grads = torch.autograd.grad((out * dout).sum() + aux, [x, *moe.parameters()])
            found.append([out, aux, *grads])
        for want, *others in zip(*found, strict=True):
            for got in others:
                torch.testing.assert_close(got, want)
    assert counter.frame_count == 1, "compiled again for another number of tokens"


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
