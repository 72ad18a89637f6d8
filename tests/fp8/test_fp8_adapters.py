"""precision="fp8" with biases and LoRA adapters, in plain PyTorch."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from adapters import adapter, run_adapted, written_out
from fp8_value_checks import check_fp8_values
from helpers import Case, Inputs, _kinks, make_inputs, plain, relative_error, run, same_bits
from torch.utils.checkpoint import checkpoint

import sonicmoe
from sonicmoe import ActivationType, MemoryPolicy
from sonicmoe.layer.lora import LowRank, with_adapter
from sonicmoe.layer.weights import Projection
from sonicmoe.ops.lora import column_norm_bound
from sonicmoe.reference import fp8

SHAPE = "320,256,144,4,2"  # I is no multiple of 128
LIMIT, KINKS = 0.076, 0.18  # the second of gradients beyond an activation whose slope jumps
Z_IN_E4M3 = 0.055  # what memory="e4m3" adds to gradients
RANKS = (12, 20)  # no multiples of 8
BEYOND = ("dx", "dw1", "da1", "db1")
ACTIVATIONS = [
    (ActivationType.SWIGLU, "interleaved"),
    (ActivationType.SWIGLU, "concatenated"),
    (ActivationType.SWIGLU_CLAMPED, "interleaved"),
    (ActivationType.SWIGLU_CLAMPED, "concatenated"),
    (ActivationType.GELU, "interleaved"),
]
BIASES = {"none": (), "b1": ("b1",), "b2": ("b2",), "both": ("b1", "b2")}
LORAS = {"W1": (True, False), "W2": (False, True), "both": (True, True)}
SMALL = Case("40,32,16,5,2", bias=True, routing="dropped")


def with_biases(case: Case, names: tuple[str, ...]) -> Inputs:
    inputs = make_inputs(replace(case, bias=True))
    b1, b2 = (getattr(inputs, name) if name in names else None for name in ("b1", "b2"))
    return replace(inputs, b1=b1, b2=b2)


def in_fp8(case: Case, **options):
    return partial(sonicmoe.experts, **{"precision": "fp8"} | case.options | options)


def adapters(inputs: Inputs) -> tuple[LowRank, LowRank]:
    return adapter(inputs.w1, RANKS[0], 0.5), adapter(inputs.w2, RANKS[1], 1.0)


def run_lora(layer, inputs: Inputs, on: tuple[bool, bool]) -> dict[str, torch.Tensor]:
    """The output and the gradients of x, the scores and the factors of the adapters in `on`."""

    def adapted(arguments, *loras):
        lora1, lora2 = (lora if used else None for lora, used in zip(loras, on, strict=True))
        out = layer(**arguments, lora1=lora1, lora2=lora2)
        unused = [t for lora, used in zip(loras, on, strict=True) if not used for t in lora[:2]]
        return out + sum(0 * t.sum() for t in unused)

    found = run_adapted(adapted, inputs, *adapters(inputs))
    unused = [name for i, used in enumerate(on, 1) if not used for name in (f"da{i}", f"db{i}")]
    return {name: t for name, t in found.items() if name not in unused}


def formed(case: Case):
    """The experts in fp64, with W + scale·B·A."""

    def layer(*, lora1, lora2, **given):
        for name, lora in (("w1", lora1), ("w2", lora2)):
            if lora is not None:
                given[name] = written_out(given[name], lora)
        return plain(case)(**given)

    return layer


def within(got, exact, activation, in_e4m3=False) -> None:
    for name, t in got.items():
        limit = KINKS if _kinks(activation) and name in BEYOND else LIMIT
        if in_e4m3 and name != "out":
            limit = math.hypot(limit, Z_IN_E4M3)
        assert relative_error(t, exact[name]) <= limit, (name, relative_error(t, exact[name]))


# --- errors, and the bits of memory policies ------------------------------------------------------
@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize(("activation", "gate_up"), ACTIVATIONS, ids=str)
def test_biases(activation, gate_up, biases):
    case = Case(SHAPE, activation=activation, gate_up=gate_up)
    inputs = with_biases(case, BIASES[biases])
    exact, keep = run(plain(case), inputs.double()), run(in_fp8(case), inputs)
    within(keep, exact, activation)
    within(run(in_fp8(case, memory="e4m3"), inputs), exact, activation, in_e4m3=True)
    same_bits(keep, run(in_fp8(case, memory=MemoryPolicy("recompute", 3)), inputs))
    others = run(in_fp8(case, precision="fp8_bf16_dw"), inputs)
    within(others, exact, activation)
    alike = {name: t for name, t in keep.items() if name not in ("dw1", "dw2")}
    same_bits(alike, {name: others[name] for name in alike})


@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("on", LORAS)
@pytest.mark.parametrize(("activation", "gate_up"), ACTIVATIONS, ids=str)
def test_adapters(activation, gate_up, on, biases):
    case = Case(SHAPE, activation=activation, gate_up=gate_up)
    inputs = with_biases(case, BIASES[biases])
    exact = run_lora(formed(case), inputs.double(), LORAS[on])
    keep = run_lora(in_fp8(case), inputs, LORAS[on])
    within(keep, exact, activation)
    in_e4m3 = run_lora(in_fp8(case, memory="e4m3"), inputs, LORAS[on])
    within(in_e4m3, exact, activation, in_e4m3=True)
    policy = MemoryPolicy("recompute", 3)
    for options in ({"memory": policy}, {"precision": "fp8_bf16_dw", "memory": policy}):
        same_bits(keep, run_lora(in_fp8(case, **options), inputs, LORAS[on]))


@pytest.mark.parametrize("routing", ["dropped", "empty_experts", "one_expert"])
def test_weights_that_lie_transposed_and_other_routings(routing):
    case = Case(SHAPE, transposed=True, routing=routing, bias=True)
    inputs = make_inputs(case)
    within(run(in_fp8(case), inputs), run(plain(case), inputs.double()), case.activation)
    exact = run_lora(formed(case), inputs.double(), (True, True))
    within(run_lora(in_fp8(case), inputs, (True, True)), exact, case.activation)


@pytest.mark.parametrize("values", ["trained", "rows_30", "log_normal"])
def test_biases_beside_values_of_trained_models(values):
    """As with exact maxima for scales."""
    check_fp8_values(Case("256,512,272,2,1", values=values, routing="uniform", bias=True))


@pytest.mark.parametrize("values", ["trained", "rows_30", "log_normal"])
def test_adapters_beside_values_of_trained_models(values):
    """No result errs more than without adapters by over a third."""
    case = Case("256,512,272,2,1", values=values, routing="uniform", bias=True)
    inputs = make_inputs(case)
    alone = run(in_fp8(case), inputs), run(plain(case), inputs.double())
    got = run_lora(in_fp8(case), inputs, (True, True))
    exact = run_lora(formed(case), inputs.double(), (True, True))
    for name in ("out", "dx", "dscores"):
        before = relative_error(alone[0][name], alone[1][name])
        assert relative_error(got[name], exact[name]) <= 4 / 3 * before, name


# --- what must not change a bit -------------------------------------------------------------------
def test_zeros_change_no_bit():
    """Biases of zero, and adapters whose B is zero."""
    inputs = with_biases(SMALL, ())
    want = run(in_fp8(SMALL), inputs)
    zeros = replace(
        inputs, b1=inputs.w1.new_zeros(inputs.w1.shape[:2]), b2=inputs.w2.new_zeros(5, 32)
    )
    got = run(in_fp8(SMALL), zeros)
    same_bits(want, {name: got[name] for name in want})

    def layer(lora1, lora2, **given):
        loras = {"lora1": lora1._replace(b=0 * lora1.b), "lora2": lora2._replace(b=0 * lora2.b)}
        return in_fp8(SMALL)(**given, **loras)

    got = run_lora(layer, inputs, (True, True))
    same_bits({name: want[name] for name in ("out", "dx", "dscores")}, {
        name: got[name] for name in ("out", "dx", "dscores")
    })  # fmt: skip


@pytest.mark.parametrize("needed", [("b1",), ("b2",), ("x", "b1"), ("scores",), ("w1", "b2")])
@pytest.mark.parametrize("precision", ["fp8", "fp8_bf16_dw"])
def test_gradients_that_are_not_needed(needed, precision, monkeypatch):
    """The others have the same bits, and no transposed operand is made for frozen weights."""
    inputs = make_inputs(SMALL)
    want = run(in_fp8(SMALL, precision=precision), inputs)
    inputs.differentiable = needed
    asked, backward = [], fp8.dz
    monkeypatch.setattr(fp8, "dz", lambda *a: asked.append(a[-1]) or backward(*a))
    got = run(in_fp8(SMALL, precision=precision), inputs)
    same_bits({name: want[name] for name in got}, got)
    in_fp8_too = precision == "fp8"
    rows = bool({"x", "b1"} & {*needed}) or ("w1" in needed and not in_fp8_too)
    columns = [name in needed and in_fp8_too for name in ("w1", "w2")]
    assert asked[0] == (rows, *columns, "scores" in needed)


@pytest.mark.parametrize("frozen", [("a", "b"), ("a",), ("b",)], ids=str)
@pytest.mark.parametrize("which", [1, 2])
def test_frozen_factors(which, frozen, monkeypatch):
    """The other gradients have the same bits; frozen weights have no transposed operands."""
    inputs = make_inputs(SMALL)
    want = run_lora(in_fp8(SMALL), inputs, (True, True))
    asked, backward = [], fp8.dz
    monkeypatch.setattr(fp8, "dz", lambda *a: asked.append(a[-1]) or backward(*a))

    def layer(**given):
        lora = given[f"lora{which}"]
        still = {name: getattr(lora, name).detach() for name in frozen}
        zeros = sum(0 * getattr(lora, name).sum() for name in frozen)
        out = in_fp8(SMALL)(**given | {f"lora{which}": lora._replace(**still)})
        return out + zeros

    got = run_lora(layer, inputs, (True, True))
    for name in frozen:
        assert (got.pop(f"d{name}{which}") == 0).all()
    same_bits({name: want[name] for name in got}, got)
    assert not any(needs.dz_t or needs.a for needs in asked) and asked


@pytest.mark.parametrize("memory", ["keep", "e4m3", MemoryPolicy("recompute", 2)], ids=str)
def test_sorted_rows_are_the_same_experts(memory):
    case = Case("40,32,16,5,1", bias=True, routing="uniform")
    inputs = make_inputs(case)
    want = run_lora(in_fp8(case, memory=memory), inputs, (True, True))
    order = inputs.ids[:, 0].argsort(stable=True)
    counts = torch.bincount(inputs.ids[:, 0].long(), minlength=5)

    def layer(x, ids, scores, w1, w2, b1, b2, **loras):
        out = sonicmoe.grouped_experts(
            x[order], counts, w1, w2, b1, b2, scores=scores[order, 0], precision="fp8",
            memory=memory, **loras,
        )  # fmt: skip
        return torch.empty_like(out).index_copy(0, order, out)

    got = run_lora(layer, inputs, (True, True))
    for name, t in got.items():  # the output is rounded once more where it is combined
        assert relative_error(t, want[name].double()) < 0.005, name


# --- dscores, db1 and the bound of dZ -------------------------------------------------------------
def test_dscores_have_the_bias():
    inputs = make_inputs(SMALL)
    alone = run(in_fp8(SMALL), replace(inputs, b2=None))["dscores"]
    of_b2 = run(in_fp8(SMALL), inputs)["dscores"] - alone
    here = (inputs.ids >= 0) & (inputs.ids < 5)
    b2 = inputs.b2.float()[inputs.ids.clamp(0, 4).long()]
    want = torch.where(here, (inputs.dout.float()[:, None] * b2).sum(-1), 0.0)
    torch.testing.assert_close(of_b2, want, rtol=1e-4, atol=1e-4)


def test_db1_sums_dz_as_it_was_rounded():
    """Rounding is unbiased: of 1024 rows the sum errs as a row does, not √1024 times as much."""
    case = Case("1024,256,128,1,1", bias=True, routing="uniform")
    inputs = make_inputs(case)
    exact = run(plain(case), inputs.double())["db1"]
    assert relative_error(run(in_fp8(case), inputs)["db1"], exact) <= LIMIT


def projection(w: torch.Tensor, rank: int, *, scale: float = 1.0) -> Projection:
    lora = adapter(w, rank, scale)
    lora = LowRank(lora.a.detach(), lora.b.detach(), scale)
    return with_adapter(Projection(w, None), lora, torch.bfloat16, "torch")


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_norms_of_columns_are_bounds(rank):
    """At most a few percent above the norm, and above it where B a cancels."""
    w = projection(torch.zeros(3, 96, 48).bfloat16(), rank)
    a, b = w.lora_a.double(), w.lora_b.double()
    exact, bound = (b @ a).norm(dim=1), column_norm_bound(w)
    assert (bound >= exact).all() and (bound <= 1.1 * exact).all()
    twice = torch.cat([w.lora_a, w.lora_a], 1), torch.cat([w.lora_b, -w.lora_b], 2)
    cancelled = column_norm_bound(Projection(w.weight, None, *twice))
    v = (torch.randn(3, 500, 96).bfloat16().float() @ twice[1].float()).bfloat16()
    found = (v.double() @ twice[0].double()).abs().amax(1)  # rounding of V alone
    assert (cancelled > 0).all() and (found <= 96**0.5 * cancelled).all()


def test_no_bound_is_exceeded_beside_an_adapter(monkeypatch):
    """dO is parallel to the largest column of B2 A2, and W2 is zero: dZ is the adapter's."""
    largest, saturated = [], fp8._saturated

    def recorded(value):
        largest.append(value.abs().max().item())
        return saturated(value)

    monkeypatch.setattr(fp8, "_saturated", recorded)
    case = Case("64,256,128,1,1", activation=ActivationType.RELU, routing="uniform")
    inputs = make_inputs(case)
    inputs.w2.zero_()
    lora = adapter(inputs.w2, 8, 1.0)
    columns = written_out(inputs.w2, lora)[0].detach()
    inputs.dout = columns.T[columns.norm(dim=0).argmax()].expand(64, -1).contiguous()
    given = inputs.arguments() | {"x": inputs.x.requires_grad_()}
    in_fp8(case)(**given, lora2=lora).backward(inputs.dout)
    assert 300 < max(largest) <= 448


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compiled", "checkpointed", "autocast"])
def test_modes(mode):
    """Every mode has the bits of the layer as it is."""
    inputs = make_inputs(SMALL)
    want = run_lora(in_fp8(SMALL), inputs, (True, True))

    def layer(x, **given):
        if mode == "checkpointed":
            return checkpoint(lambda x: in_fp8(SMALL)(x=x, **given), x, use_reentrant=False)
        return in_fp8(SMALL)(x=x, **given)

    if mode == "compiled":
        torch._dynamo.reset()
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        same_bits(want, run_lora(layer, inputs, (True, True)))
