"""precision="fp8" in plain PyTorch: errors, range, and every way to call it."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from fp8_cases import KINKS, LIMITS
from helpers import (
    ACTIVATIONS,
    ROUTINGS,
    Case,
    _kinks,
    check_fp32_weights,
    check_zeros,
    make_inputs,
    plain,
    relative_error,
    run,
    same_bits,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import sonicmoe
from sonicmoe import ActivationType, MoE
from sonicmoe.reference import fp8
from sonicmoe.validation import fp8_backend

SHAPE = "512,256,192,8,2"  # I is no multiple of 128
SMALL = Case("40,32,16,5,2", routing="dropped")


def in_fp8(case: Case, **options):
    return partial(sonicmoe.experts, precision="fp8", **case.options, **options)


def errors(case: Case, inputs) -> dict[str, float]:
    exact = run(plain(case), inputs.double())
    got = run(in_fp8(case), inputs)
    assert not any(t.isnan().any() for t in got.values())
    return {name: relative_error(got[name], exact[name]) for name in got}


def within(found: dict[str, float], activation=ActivationType.SWIGLU) -> None:
    for name, error in found.items():
        limit = KINKS if _kinks(activation) and name in ("dx", "dw1") else LIMITS[name]
        assert error <= limit, (name, error)


# --- errors ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.value)
def test_error_budget(activation, gate_up, transposed):
    case = Case(SHAPE, activation=activation, gate_up=gate_up, transposed=transposed)
    within(errors(case, make_inputs(case)), activation)


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_routings(routing):
    case = Case(SHAPE, routing=routing)
    inputs = make_inputs(case)
    within(errors(case, inputs))
    check_zeros(run(in_fp8(case), inputs), inputs)


def test_the_worst_tokens_where_gradients_differ():
    """A scale for a block of tokens would lose the small ones."""
    case = Case(SHAPE)
    inputs = make_inputs(case)
    inputs.dout = (inputs.dout * torch.exp2(5 * torch.randn(512, 1))).bfloat16()
    got, exact = run(in_fp8(case), inputs)["dx"], run(plain(case), inputs.double())["dx"]
    by_token = (got.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert by_token.sort().values[-51:].mean() <= 0.09


def test_a_channel_a_thousand_times_larger():
    case = Case(SHAPE)
    inputs = make_inputs(case)
    inputs.x[:, 3] *= 1000
    inputs.w1[:, :, 3] /= 1000
    exact, got = run(plain(case), inputs.double()), run(in_fp8(case), inputs)
    assert relative_error(got["out"], exact["out"]) <= LIMITS["out"]
    others = torch.arange(256) != 3
    # The others in a row of X are small beside its scale: some are subnormal.
    for name, limit in (("dx", LIMITS["dx"]), ("dw1", 0.12)):
        error = relative_error(got[name][..., others], exact[name][..., others])
        assert error <= limit, name


@pytest.mark.parametrize("argument", ["x", "dout"])
@pytest.mark.parametrize("exponent", [20, -20])
def test_tokens_a_million_times_larger_or_smaller(argument, exponent):
    case = Case(SHAPE)
    inputs = make_inputs(case)
    getattr(inputs, argument)[::7] *= 2.0**exponent
    exact, got = run(plain(case), inputs.double()), run(in_fp8(case), inputs)
    for name in ("out", "dx"):
        by_token = (got[name].double() - exact[name]).norm(dim=1) / exact[name].norm(dim=1)
        if (argument, exponent, name) == ("x", 20, "dx"):
            by_token[::7] = 0  # so far out, SwiGLU is ReGLU and has its kink
        assert by_token.sort().values[-51:].mean() <= 0.09, name
    for name in ("dw1", "dw2"):
        limit = KINKS if (argument, exponent, name) == ("x", 20, "dw1") else LIMITS[name]
        assert relative_error(got[name], exact[name]) <= limit, name


@pytest.mark.parametrize("zero", ["x", "dout", "scores", "w1", "w2"])
def test_zeros(zero):
    """Rows of zeros, or an expert of zeros."""
    inputs = make_inputs(SMALL)
    getattr(inputs, zero)[2] = 0
    got, exact = run(in_fp8(SMALL), inputs), run(plain(SMALL), inputs.double())
    for name, t in got.items():
        assert relative_error(t, exact[name]) <= 0.1, name
    assert (got["out" if zero in ("x", "scores") else "dx"][2] == 0).all() or zero[0] == "w"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("argument", ["x", "dout"])
def test_what_is_not_finite_stays_with_its_token(argument, value):
    case = Case("40,32,16,5,2", routing="uniform")
    inputs = make_inputs(case)
    clean = run(in_fp8(case), inputs)
    getattr(inputs, argument)[7, 5] = value
    got = run(in_fp8(case), inputs)
    others = torch.arange(40) != 7
    touched = torch.zeros(5, dtype=torch.bool).index_fill_(0, inputs.ids[7].long(), True)
    assert not touched.all()
    for name in ("out", "dx", "dscores"):
        assert torch.equal(got[name][others], clean[name][others]), name
    assert got["dx"][7].isnan().all()
    assert got["out"][7].isnan().all() == (argument == "x")
    for name in ("dw1", "dw2"):
        assert torch.equal(got[name][~touched], clean[name][~touched]), name
        assert got[name][touched].isnan().any((1, 2)).all(), name


def test_a_weight_that_is_not_finite_stays_with_its_expert():
    inputs = make_inputs(SMALL)
    inputs.w1[3, 2, 1] = torch.inf
    got = run(in_fp8(SMALL), inputs)
    meets = (inputs.ids == 3).any(-1)
    assert got["out"][meets].isnan().all() and not got["out"][~meets].isnan().any()
    assert not got["dx"][~meets].isnan().any()
    assert got["dw2"].isnan().any((1, 2)).tolist() == [False, False, False, True, False]


# --- ways to call it ------------------------------------------------------------------------------
def test_sorted_rows_and_pairs_are_the_same_experts():
    case = Case("40,32,16,5,1", routing="uniform")
    inputs = make_inputs(case)
    want = run(in_fp8(case), inputs)
    order = inputs.ids[:, 0].argsort(stable=True)
    counts = torch.bincount(inputs.ids[:, 0].long(), minlength=5)
    x = inputs.x[order].requires_grad_()
    scores = inputs.scores[order, 0].requires_grad_()
    w1, w2 = inputs.w1.requires_grad_(), inputs.w2.requires_grad_()
    for gaps in (False, True):
        starts = {"offsets": counts.cumsum(0) - counts} if gaps else {}
        out = sonicmoe.grouped_experts(x, counts, w1, w2, scores=scores, **starts, precision="fp8")
        found = torch.autograd.grad(out, (x, scores, w1, w2), inputs.dout[order])
        assert relative_error(out, want["out"][order].double()) < 0.005  # rounded once more
        for name, t in zip(("dx", "dscores", "dw1", "dw2"), found, strict=True):
            expected = want[name].flatten() if name == "dscores" else want[name]
            expected = expected if name[1] == "w" else expected[order]
            assert relative_error(t, expected.double()) < 1e-6, name


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
def test_gradients_of_fp32_weights(transposed, monkeypatch):
    monkeypatch.setattr("helpers.ours", lambda case, backend: in_fp8(case, backend=backend))
    check_fp32_weights(Case(SMALL.shape, transposed=transposed), "cpu", "torch")


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
def test_main_grad(transposed):
    case = Case(SMALL.shape, transposed=transposed)
    inputs = make_inputs(case)
    want = run(in_fp8(case), inputs)
    given = inputs.arguments()
    given |= {name: torch.nn.Parameter(given[name]) for name in ("w1", "w2")}
    with torch.no_grad():
        for name in ("w1", "w2"):
            given[name].main_grad = torch.full_like(given[name], 0.5, dtype=torch.float32)
    given["x"].requires_grad_()
    for _ in range(2):
        in_fp8(case)(**given).backward(inputs.dout)
    assert torch.equal(given["x"].grad, 2 * want["dx"])
    for name in ("w1", "w2"):
        assert given[name].grad is None and given[name].main_grad.stride() == given[name].stride()
        added = (given[name].main_grad - 0.5) / 2
        assert relative_error(want[f"d{name}"], added.double()) < 2**-8, name


@pytest.mark.parametrize("needed", [("x",), ("w1",), ("w2",), ("scores",), ("x", "w2")])
def test_gradients_that_are_not_needed(needed, monkeypatch):
    """The others have the same bits, and no transposed operand is made for frozen weights."""
    inputs = make_inputs(SMALL)
    want = run(in_fp8(SMALL), inputs)
    inputs.differentiable = needed
    asked, backward = [], fp8.dz
    monkeypatch.setattr(fp8, "dz", lambda *a: asked.append(backward(*a)) or asked[0])
    got = run(in_fp8(SMALL), inputs)
    same_bits({name: want[name] for name in got}, got)
    of_x, of_w1 = ("x" in needed,) * 2, ("w1" in needed,) * 2
    dz, of_dw2, dscores = asked[0]
    expected = (*of_x, *of_w1, "w2" in needed, "scores" in needed)
    assert tuple(t is not None for t in (*dz, of_dw2, dscores)) == expected


def test_flops_are_those_of_bf16():
    """Forward 6RHI, backward 12RHI, 6RHI with frozen weights."""
    given = make_inputs(Case("40,32,16,5,2", routing="uniform")).arguments()
    unit, given["x"] = 80 * 32 * 16, given["x"].requires_grad_()
    for trained, backward in ((False, 6), (True, 12)):
        for name in ("w1", "w2"):
            given[name].requires_grad_(trained)
        with FlopCounterMode(display=False) as counted:
            out = in_fp8(SMALL)(**given)
        assert counted.get_total_flops() == 6 * unit
        with FlopCounterMode(display=False) as counted:
            out.sum().backward()
        assert counted.get_total_flops() == backward * unit


def test_what_is_kept():
    """Of the size of Z: Z alone, in bf16. Of the size of a weight: e4m3 and the parameter."""
    given, saved = make_inputs(SMALL).arguments(), []
    given |= {name: given[name].requires_grad_() for name in ("x", "w1", "w2")}

    def keep(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = in_fp8(SMALL)(**given)
    found = {(t.shape, t.dtype) for t in saved if t.dim() > 1 and t.is_floating_point()}
    assert found == {
        ((40, 32), torch.bfloat16),  # X
        ((5, 32, 32), torch.bfloat16),  # W1
        ((5, 32, 32), torch.float8_e4m3fn),
        ((5, 32, 16), torch.bfloat16),  # W2
        ((5, 16, 32), torch.float8_e4m3fn),
        ((80, 32), torch.bfloat16),  # Z
        ((1, 80), torch.float32),  # zmax, a_scale
        ((5, 16), torch.float32),  # zmax_columns, w_norm of W2
        ((40, 2), torch.float32),  # scores
    }
    out.sum().backward()


def test_z_is_free_before_dx_is_allocated(monkeypatch):
    kept, free = [], []
    up, backward = fp8.up, fp8.dx

    def recorded(*args):
        found = up(*args)
        kept.append(StorageWeakRef(found[0].untyped_storage()))
        return found

    def checked(*args):
        free.append(kept[0].expired())
        return backward(*args)

    monkeypatch.setattr(fp8, "up", recorded)
    monkeypatch.setattr(fp8, "dx", checked)
    run(in_fp8(SMALL), make_inputs(SMALL))
    assert free == [True]


def test_inference_keeps_nothing():
    inputs = make_inputs(SMALL)
    want = run(in_fp8(SMALL), inputs)["out"]
    with torch.no_grad():
        assert torch.equal(in_fp8(SMALL)(**inputs.arguments()), want)
    with torch.inference_mode():
        assert torch.equal(in_fp8(SMALL)(**inputs.arguments()), want)


def test_second_derivatives_are_refused():
    given = make_inputs(SMALL).arguments()
    x = given["x"].requires_grad_()
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(in_fp8(SMALL)(**given).sum(), x, create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_compiled_without_a_graph_break(cached):
    """One graph for changing numbers of tokens; weights that change are noticed."""
    torch._dynamo.reset()
    moe = MoE(4, 2, 32, 16, dtype=torch.bfloat16, precision="fp8", cache_fp8_weights=cached)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for tokens in (12, 20, 7):
        x = torch.randn(tokens, 32, dtype=torch.bfloat16, requires_grad=True)
        dout = torch.randn(tokens, 32)
        found = []
        for layer in (moe, compiled):
            out, aux = layer(x)
            leaves = [x, *moe.parameters()]
            found.append([out, *torch.autograd.grad((out * dout).sum() + aux, leaves)])
        for want, got in zip(*found, strict=True):
            assert torch.equal(want, got)
        counts.append(counter.frame_count)
        moe.c_fc.weight.data.mul_(2)
        moe.refresh_fp8_weights()
    # Twice for the first: PyTorch starts over to make constants of the loss coefficients.
    assert len(set(counts)) == 1, "compiled again for another number of tokens"
    torch._dynamo.reset()


def test_in_a_checkpoint(monkeypatch):
    """The same bits, and the output is not computed again."""
    inputs = make_inputs(SMALL)
    want = run(in_fp8(SMALL), inputs)
    outputs, gemm = [], fp8.down
    monkeypatch.setattr(fp8, "down", lambda *a: outputs.append(a) or gemm(*a))

    def layer(x, ids, scores, w1, w2, b1, b2):
        return checkpoint(in_fp8(SMALL), x, ids, scores, w1, w2, use_reentrant=False)

    same_bits(want, run(layer, inputs))
    assert len(outputs) == 2  # down and dX


def test_the_layer_differs_in_precision_alone():
    torch.manual_seed(0)
    moe = MoE(8, 2, 64, 32, shared_intermediate_size=16, dtype=torch.bfloat16)
    low = MoE(8, 2, 64, 32, shared_intermediate_size=16, dtype=torch.bfloat16, precision="fp8")
    assert list(low.state_dict()) == list(moe.state_dict())
    low.load_state_dict(moe.state_dict())
    x = torch.randn(3, 20, 64, dtype=torch.bfloat16)
    (want, aux), (out, low_aux) = moe(x), low(x)
    assert torch.equal(aux, low_aux) and out.shape == x.shape
    assert 0.01 < relative_error(out, want.double()) < 0.075
    again, _ = copy.deepcopy(low)(x)
    assert torch.equal(out, again)
    inference, no_loss = low(x, is_inference_mode=True)
    assert torch.equal(out, inference) and no_loss is None


@pytest.mark.parametrize(("major", "hip"), [(8, None), (9, None), (10, None), (12, None), (9, "7")])
def test_kernels_are_for_hopper(major, hip, monkeypatch):
    """On another GPU FP8 raises: plain PyTorch must be asked for."""
    found = SimpleNamespace(major=major, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    on_gpu: Any = SimpleNamespace(is_cuda=True, is_meta=False, device="cuda:0")
    if major == 9 and hip is None:
        assert fp8_backend("triton", on_gpu) == "triton"
    else:
        got = "an AMD GPU" if hip else f"compute capability {major}.0"
        with pytest.raises(ValueError, match=rf"^precision: .* FP8 on {got}.*backend='torch'"):
            fp8_backend("triton", on_gpu)
    assert fp8_backend("torch", on_gpu) == "torch"
    assert fp8_backend("triton", torch.empty(1)) == "torch"
    assert fp8_backend("triton", torch.empty(1, device="meta")) == "triton"


def test_autocast():
    moe = MoE(8, 2, 64, 32, precision="fp8")
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = moe(torch.randn(20, 64))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert {p.grad.dtype for p in moe.parameters()} == {torch.float32}


# --- bad input ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp16"}, r"^precision: expected 'fp8', 'fp8_bf16_dw' or None, got 'fp16'"),
        ({"x": torch.float32, "w1": torch.float32, "w2": torch.float32}, "^x: expected bfloat16"),
        ({"shape": "40,32,8,5,2"}, "^I of w2: expected a multiple of 16 with precision='fp8'"),
        ({"shape": "40,24,16,5,2"}, "^H of w2: expected a multiple of 16 with precision='fp8'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_arguments(changes, message):
    changes = dict(changes)
    given = make_inputs(Case(changes.pop("shape", SMALL.shape))).arguments()
    given["precision"] = "fp8"
    for name, change in changes.items():
        given[name] = given[name].to(change) if isinstance(change, torch.dtype) else change
    with pytest.raises(ValueError, match=message):
        sonicmoe.experts(**given)


def test_weights_of_another_dtype():
    given = make_inputs(SMALL).arguments()
    given["w2"] = given["w2"].half()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"^w2: expected bfloat16 or float32"),
    ):
        sonicmoe.experts(**given, precision="fp8")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"precision": "bf16"}, "precision"),
        ({"precision": "fp8", "hidden_size": 24}, "hidden_size"),
        ({"precision": "fp8", "intermediate_size": 24}, "intermediate_size"),
        ({"cache_fp8_weights": True}, "cache_fp8_weights"),
    ],
)
def test_bad_options_of_the_layer(options, name):
    sizes = {"hidden_size": 32, "intermediate_size": 16}
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        MoE(num_experts=4, num_experts_per_tok=2, **sizes | options)
