"""The gate before the clock: right results pass, wrong ones are seen, tensor by tensor."""

from dataclasses import replace

import pytest
import torch
from research import peers

from sonicmoe.enums import ActivationType
from sonicmoe.tools.candidates import ours
from sonicmoe.tools.cases import ROUTERS, Case
from sonicmoe.tools.inputs import ROUTINGS, make_inputs
from sonicmoe.tools.values import TRAINED
from sonicmoe.tools.verify import Check, passed, verify

SHAPE = "96,64,32,8,2"


def inputs_of(routing="uniform", dtype=torch.float32, values="gaussian", **options):
    return make_inputs(Case.of_shape(SHAPE, **options), routing, "cpu", dtype, values=values)


@pytest.mark.parametrize("router", [True, False], ids=["router", "given"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_layer_passes(routing, router):
    inputs = inputs_of(routing)
    checks = verify(ours(inputs, router=router), inputs)
    choice = "router_w" if router else "scores"
    assert [check.tensor for check in checks] == ["out", "x", "w1", "w2", choice]
    assert passed(checks)


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("activation", [ActivationType.SWIGLU_CLAMPED, ActivationType.RELU_SQ])
def test_every_router_with_bias(kind, activation):
    inputs = inputs_of(activation=activation, bias=True, router=kind)
    checks = verify(ours(inputs, router=True, gate_up="concatenated"), inputs)
    assert {"b1", "b2"} <= {check.tensor for check in checks}
    assert passed(checks)


def test_bf16_passes_within_the_error_of_plain_pytorch():
    inputs = inputs_of(dtype=torch.bfloat16)
    checks = verify(ours(inputs, router=True), inputs)
    assert passed(checks)
    assert all(1e-4 < check.plain < 1e-1 for check in checks)


def test_pytorch_as_a_peer_passes():
    inputs = inputs_of()
    assert passed(verify(peers.grouped_mm(inputs), inputs, peer=True))


class Doctored:
    """A candidate with one result changed."""

    def __init__(self, candidate, tensor, change):
        self.candidate, self.tensor, self.change = candidate, tensor, change

    def __getattr__(self, name):
        return getattr(self.candidate, name)

    def gradients(self, out, dout=None):
        found = self.candidate.gradients(out, dout)
        found[self.tensor] = self.change(found[self.tensor].clone())
        return found


def _zero_one_expert(grad):
    grad[0] = 0
    return grad


@pytest.mark.parametrize("tensor", ["x", "w1", "w2", "router_w"])
@pytest.mark.parametrize(
    "change",
    [lambda g: g * 1.01, _zero_one_expert, lambda g: g.index_fill(0, torch.tensor([1]), torch.nan)],
    ids=["one percent", "a missing row", "nan"],
)
def test_a_wrong_gradient_is_seen(tensor, change):
    inputs = inputs_of()
    checks = verify(Doctored(ours(inputs, router=True), tensor, change), inputs)
    assert [check.tensor for check in checks if not check.passed] == [tensor]


def test_a_wrong_output_is_seen():
    inputs = inputs_of()
    candidate = ours(inputs, router=True)
    wrong = replace(candidate, forward=lambda: candidate.forward() * 1.001)
    assert not {c.tensor: c for c in verify(wrong, inputs)}["out"].passed


def test_the_wrong_layout_is_seen():
    inputs = inputs_of()
    candidate = replace(ours(inputs, router=True), gate_up="concatenated")
    assert not passed(verify(candidate, inputs))


def test_nan_never_passes():
    assert not Check("out", float("nan"), 1.0, 2.0).passed


# --- values of trained models ---------------------------------------------------------------------
@pytest.mark.parametrize("values", TRAINED)
def test_values_of_trained_models_pass(values):
    inputs = inputs_of(values=values, bias=True)
    assert inputs.values == values
    checks = verify(ours(inputs, router=False), inputs)
    assert passed(checks)
    slices = [check.tensor for whole in checks for check in whole.slices]
    kinds = {"out": "token", "x": "token", "w1": "row", "w2": "column"}
    quantiles = ("median", "90th percentile")
    assert slices == [f"{name}, {q} {kind}" for name, kind in kinds.items() for q in quantiles]


def test_values_do_not_change_the_routing():
    gaussian, outliers = inputs_of(), inputs_of(values="channels_100")
    assert torch.equal(gaussian.ids, outliers.ids)
    assert torch.equal(gaussian.router_ids, outliers.router_ids)
    assert not torch.equal(gaussian.x, outliers.x) and not torch.equal(gaussian.w1, outliers.w1)


def test_wrong_small_rows_are_seen_though_the_norm_hides_them():
    inputs = inputs_of(dtype=torch.bfloat16, values="rows_100")
    right = ours(inputs, router=False)

    def spoil_small_rows(grad):
        size = grad.float().norm(dim=-1, keepdim=True)
        return torch.where(size < size.quantile(0.6), 1.1 * grad, grad)

    checks = verify(Doctored(right, "w1", spoil_small_rows), inputs)
    (found,) = (check for check in checks if not check.passed)
    assert found.tensor == "w1" and found.error <= found.allowed
    assert [check.tensor for check in found.slices if not check.passed][:1] == ["w1, median row"]


@pytest.mark.parametrize(
    ("tensor", "change"),
    [("w2", lambda g: g.index_fill(0, torch.tensor([1]), torch.inf)), ("x", lambda g: g + 1e-30)],
    ids=["infinity", "not zero"],
)
def test_what_must_be_finite_or_zero(tensor, change):
    """Tokens whose dO is zero have a dX that is zero."""
    inputs = inputs_of(values="zero_rows")
    checks = verify(Doctored(ours(inputs, router=False), tensor, change), inputs)
    (bad,) = (check for check in checks if not check.passed)
    assert bad.tensor == tensor and bad.wrong > 0


def test_where_plain_pytorch_overflows_nothing_is_judged():
    inputs = inputs_of(dtype=torch.float16, values="huge")
    checks = {check.tensor: check for check in verify(ours(inputs, router=False), inputs)}
    assert passed(list(checks.values()))
    skipped = {name: checks[name].skipped for name in ("out", "x", "w1", "w2", "scores")}
    assert skipped == {"out": 96, "x": 96, "w1": 8 * 64, "w2": 8 * 32, "scores": 96}
    assert not checks["out"].slices
