"""precision="fp8" on Hopper: as exact as the same arithmetic in plain PyTorch, in every mode."""

from functools import partial

import pytest
import torch
from adapters import adapter, run_adapted, written_out
from helpers import (
    ROUTINGS,
    Case,
    check_zeros,
    make_inputs,
    plain,
    relative_error,
    run,
    run_poisoned,
    same_bits,
)

import sonicmoe
from sonicmoe import ActivationType, MemoryPolicy, MoE
from sonicmoe.layer.lora import LowRank

pytestmark = pytest.mark.gpu
CUDA = "cuda"
ODD = "777,272,144,9,3"
MARGIN = 1.1


def in_fp8(case: Case, backend: str | None = None, **options):
    return partial(sonicmoe.experts, precision="fp8", backend=backend, **case.options, **options)


def check(case: Case) -> None:
    inputs = make_inputs(case, CUDA)
    exact = run(plain(case), inputs.double())
    rough = run(in_fp8(case, "torch"), inputs)
    got = run_poisoned(lambda: run(in_fp8(case), inputs), CUDA)
    check_zeros(got, inputs)
    for name, t in got.items():
        error, allowed = relative_error(t, exact[name]), relative_error(rough[name], exact[name])
        assert error <= MARGIN * allowed + 1e-6, (name, error, allowed)
        assert t.dtype == rough[name].dtype and t.stride() == rough[name].stride()


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_routings(routing):
    check(Case(ODD, routing=routing))


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize(
    "activation", [ActivationType.SWIGLU, ActivationType.GEGLU, ActivationType.SWIGLU_CLAMPED]
)
def test_gated_activations(activation, gate_up, transposed):
    check(Case(ODD, activation=activation, gate_up=gate_up, transposed=transposed))


@pytest.mark.parametrize("activation", [ActivationType.RELU_SQ, ActivationType.GELU])
def test_plain_activations(activation):
    check(Case(ODD, activation=activation))


@pytest.mark.parametrize(
    "shape", ["4096,1536,256,32,8", "2048,2048,1024,8,2", "1,128,128,4,2", "300,4096,128,64,16"]
)
def test_shapes(shape):
    check(Case(shape, routing="uniform"))


# --- biases and adapters --------------------------------------------------------------------------
@pytest.mark.parametrize("routing", ["dropped", "empty_experts", "one_expert", "uniform"])
def test_biases_by_routing(routing):
    check(Case(ODD, routing=routing, bias=True))


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@pytest.mark.parametrize(
    ("activation", "gate_up"),
    [
        (ActivationType.SWIGLU, "interleaved"),
        (ActivationType.GEGLU, "concatenated"),
        (ActivationType.SWIGLU_CLAMPED, "interleaved"),
        (ActivationType.SWIGLU_CLAMPED, "concatenated"),
        (ActivationType.GELU, "interleaved"),
    ],
)
def test_biases(activation, gate_up, transposed):
    case = Case(ODD, activation=activation, gate_up=gate_up, transposed=transposed, bias=True)
    check(case)


def lora_layer(case: Case, on=(True, True), **options):
    """For `run_adapted`: the adapters of W1 and W2 that are `on`."""

    def layer(arguments, *loras):
        given = {f"lora{i}": lora for i, lora in enumerate(loras, 1) if on[i - 1]}
        out = sonicmoe.experts(
            **arguments, **given, **{"precision": "fp8"} | case.options | options
        )
        unused = [t for lora, used in zip(loras, on, strict=True) if not used for t in lora[:2]]
        return out + sum(0 * t.sum() for t in unused)

    return layer


def check_adapters(case: Case, ranks=(12, 72), on=(True, True), **options) -> dict:
    inputs = make_inputs(case, CUDA)
    loras = adapter(inputs.w1, ranks[0], 0.5), adapter(inputs.w2, ranks[1], 1.0)

    def formed(arguments, *loras):
        for name, lora, used in zip(("w1", "w2"), loras, on, strict=True):
            arguments[name] = written_out(arguments[name], lora if used else lora._replace(scale=0))
        return plain(case)(**arguments)

    exact = run_adapted(formed, inputs.double(), *loras)
    rough = run_adapted(lora_layer(case, on, backend="torch", **options), inputs, *loras)
    layer = lora_layer(case, on, **options)
    got = run_poisoned(partial(run_adapted, layer, inputs, *loras), CUDA)
    for name, t in got.items():
        error, allowed = relative_error(t, exact[name]), relative_error(rough[name], exact[name])
        assert error <= MARGIN * allowed + 1e-6, (name, error, allowed)
    return got


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_adapters_by_routing(routing):
    check_adapters(Case(ODD, routing=routing, bias=True))


@pytest.mark.parametrize("on", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("ranks", [(8, 8), (64, 16), (130, 40)], ids=str)
def test_adapters_of_other_ranks(ranks, bias, on):
    check_adapters(Case(ODD, routing="uniform", bias=bias), ranks, on)


@pytest.mark.parametrize("transposed", [False, True], ids=["enk", "ekn"])
@pytest.mark.parametrize(
    ("activation", "gate_up"),
    [
        (ActivationType.SWIGLU, "concatenated"),
        (ActivationType.SWIGLU_CLAMPED, "interleaved"),
        (ActivationType.SWIGLU_CLAMPED, "concatenated"),
        (ActivationType.GELU, "interleaved"),
    ],
)
def test_adapters_of_activations(activation, gate_up, transposed):
    case = Case(ODD, activation=activation, gate_up=gate_up, transposed=transposed, bias=True)
    check_adapters(case)


@pytest.mark.parametrize("shape", ["4096,1536,256,32,8", "2048,2048,1024,8,2", "1,128,128,4,2"])
def test_adapters_of_shapes(shape):
    check_adapters(Case(shape, routing="uniform", bias=True))


@pytest.mark.parametrize("precision", ["fp8", "fp8_bf16_dw"])
@pytest.mark.parametrize("memory", ["e4m3", "recompute", MemoryPolicy("recompute", 5)], ids=str)
def test_biases_and_adapters_with_memory_policies(memory, precision):
    """Recomputation and slices change no bit."""
    case = Case(ODD, routing="dropped", bias=True)
    inputs = make_inputs(case, CUDA)
    layer = in_fp8 if precision == "fp8" else in_bf16_dw
    keep, other = (
        run_poisoned(partial(run, layer(case, memory=policy), inputs), CUDA)
        for policy in ("keep", memory)
    )
    adapted = check_adapters(case, precision=precision, memory=memory)
    if memory == "e4m3":
        assert torch.equal(keep["out"], other["out"])
    else:
        same_bits(keep, other)
        same_bits(check_adapters(case, precision=precision), adapted)


def test_adapters_and_biases_of_zero():
    """They change the order of roundings alone."""
    case = Case(ODD, routing="dropped")
    inputs = make_inputs(case, CUDA)
    want = run(in_fp8(case), inputs)
    loras = adapter(inputs.w1, 16, 1.0), adapter(inputs.w2, 16, 1.0)
    loras = [LowRank(lora.a, torch.zeros_like(lora.b), 1.0) for lora in loras]
    inputs.b1, inputs.b2 = (torch.zeros_like(w[:, :, 0]) for w in (inputs.w1, inputs.w2))
    got = run_adapted(lora_layer(case), inputs, *loras)
    for name in ("out", "dx", "dscores"):
        torch.testing.assert_close(got[name], want[name], rtol=0.01, atol=1e-3)


def test_one_expert_with_all_rows():
    """Its weight gradient is summed in spans."""
    check(Case("20000,512,128,16,1", routing="one_expert"))


@pytest.mark.parametrize("adapted", [False, True], ids=["", "biases and adapters"])
@pytest.mark.parametrize("scores", [False, True])
def test_rows_that_arrive_sorted(scores, adapted):
    counts = torch.tensor([0, 130, 1, 300, 0, 77], device=CUDA)
    rows = torch.randn(520, 256, device=CUDA).bfloat16()  # twelve rows of no expert
    w1, w2 = (torch.randn(6, n, k, device=CUDA) / k**0.5 for n, k in ((384, 256), (256, 192)))
    w1, w2, dout = w1.bfloat16(), w2.bfloat16(), torch.randn(520, 256, device=CUDA).bfloat16()
    given, trained = {}, (w1, w2)
    if adapted:
        given |= {"b1": torch.randn(6, 384, device=CUDA).bfloat16()}
        given |= {"b2": torch.randn(6, 256, device=CUDA).bfloat16()}
        given |= {"lora1": adapter(w1, 12, 0.5), "lora2": adapter(w2, 40, 1.0)}
        trained = (*given["lora1"][:2], *given["lora2"][:2])
    leaves = [t.requires_grad_() for t in (rows, *trained)]
    weights = torch.rand(520, device=CUDA).requires_grad_() if scores else None
    leaves += [weights] if scores else []
    found = {}
    for backend in ("torch", None):
        layer = partial(sonicmoe.grouped_experts, precision="fp8", backend=backend)
        out = layer(rows, counts, w1, w2, scores=weights, **given)
        found[backend] = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for got, want in zip(found[None], found["torch"], strict=True):
        assert relative_error(got, want) < 0.02
    assert (found[None][0][508:] == 0).all() and (found[None][1][508:] == 0).all()


def test_a_token_does_not_depend_on_the_others():
    case = Case("1000,512,256,8,2", routing="uniform")
    inputs = make_inputs(case, CUDA)
    whole = run(in_fp8(case), inputs)
    for name in ("x", "ids", "scores", "dout"):
        setattr(inputs, name, getattr(inputs, name)[:333])
    part = run(in_fp8(case), inputs)
    for name in ("out", "dx", "dscores"):
        assert torch.equal(part[name], whole[name][:333]), name


@pytest.mark.parametrize("argument", ["x", "dout"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_token(argument, value):
    case = Case("400,256,128,4,1", routing="uniform")
    inputs = make_inputs(case, CUDA)
    clean = run(in_fp8(case), inputs)
    getattr(inputs, argument)[7, 5] = value
    got = run(in_fp8(case), inputs)
    others = torch.arange(400, device=CUDA) != 7
    for name in ("out", "dx"):
        assert torch.equal(got[name][others], clean[name][others]), name
    assert got["out" if argument == "x" else "dx"][7].isnan().any()
    expert = int(inputs.ids[7, 0])
    for name in ("dw1", "dw2"):
        assert got[name][[e for e in range(4) if e != expert]].isfinite().all(), name
        assert got[name][expert].isnan().any(), name


def layers(**options):
    torch.manual_seed(0)
    return MoE(8, 2, 256, 128, precision="fp8", **options).to(CUDA, torch.bfloat16)


def step(moe, x, dout):
    x = x.detach().requires_grad_()
    out, loss = moe(x)
    leaves = [x, *moe.parameters()]
    return [out.detach(), *torch.autograd.grad((out, loss), leaves, (dout, torch.ones_like(loss)))]


def test_compiled():
    moe = layers()
    x, dout = (torch.randn(500, 256, device=CUDA).bfloat16() for _ in range(2))
    want = step(moe, x, dout)
    got = step(torch.compile(moe, fullgraph=True), x, dout)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 0.01


def test_cached_weights_follow_the_optimizer():
    moe, fresh = layers(cache_fp8_weights=True), layers()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (moe, fresh)]
    x = torch.randn(500, 256, device=CUDA).bfloat16()
    for _ in range(3):
        outs = []
        for m, optimizer in zip((moe, fresh), optimizers, strict=True):
            out, loss = m(x)
            (out.square().mean() + loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            outs.append(out)
        assert torch.equal(*outs)


def test_fp32_weights_and_main_grad():
    case = Case("700,256,128,6,2", routing="uniform")
    inputs = make_inputs(case, CUDA)
    rounded = run(in_fp8(case), inputs)
    inputs.w1, inputs.w2 = inputs.w1.float(), inputs.w2.float()
    inputs.x, layer = inputs.x.float(), in_fp8(case)
    with torch.autocast(CUDA, torch.bfloat16):
        got = run(layer, inputs)
    for name in ("dw1", "dw2"):
        assert got[name].dtype == torch.float32
        assert relative_error(got[name], rounded[name]) < 0.004, name


def test_nothing_waits_for_the_device():
    moe = layers()
    x, dout = (torch.randn(500, 256, device=CUDA).bfloat16() for _ in range(2))
    want = step(moe, x, dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(moe, x, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same_bits(dict(enumerate(got)), dict(enumerate(want)))


def in_bf16_dw(case: Case, memory="keep", backend: str | None = None):
    options = {"precision": "fp8_bf16_dw", "memory": memory, "backend": backend}
    return partial(sonicmoe.experts, **options, **case.options)


@pytest.mark.parametrize(
    "case",
    [
        Case(ODD, routing="dropped"),
        Case(ODD, gate_up="concatenated", transposed=True),
        Case(ODD, activation=ActivationType.GELU, routing="empty_experts"),
    ],
    ids=str,
)
def test_weight_gradients_in_bf16(case):
    """As exact as plain PyTorch; output, dX and dscores have the bits of precision="fp8"."""
    inputs = make_inputs(case, CUDA)
    exact = run(plain(case), inputs.double())
    rough = run(in_bf16_dw(case, backend="torch"), inputs)
    got = run_poisoned(lambda: run(in_bf16_dw(case), inputs), CUDA)
    fp8 = run(in_fp8(case), inputs)
    for name, t in got.items():
        error, allowed = relative_error(t, exact[name]), relative_error(rough[name], exact[name])
        assert error <= MARGIN * allowed + 1e-6, (name, error, allowed)
        assert name in ("dw1", "dw2") or torch.equal(t, fp8[name]), name
