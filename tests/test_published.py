"""The two functions of the published package, called as its callers call them."""

import inspect

import pytest
import torch
from helpers import ACTIVATIONS, Case, compare, make_inputs, plain, run

import sonicmoe
from sonicmoe import ActivationType
from sonicmoe.enums import LIBRARY_NAME, is_glu
from sonicmoe.reference import layer as reference
from sonicmoe.validation import parse_activation

CASE = Case("30,16,8,5,2", torch.float32, bias=True, activation=ActivationType.GEGLU)


def _views(w1, w2):
    return w1.permute(1, 2, 0), w2.permute(1, 2, 0)


def test_signatures():
    general = list(inspect.signature(sonicmoe.moe_general_routing_inputs).parameters)
    assert general == [
        "x", "router_scores", "token_indices", "expert_indices", "w1", "b1", "w2", "b2", "E",
        "stream_id", "activation_type", "is_inference_mode_enabled", "concat_layout",
    ]  # fmt: skip
    layer = list(inspect.signature(sonicmoe.moe_TC_softmax_topk_layer).parameters)
    assert layer == [
        "x", "router_w", "w1", "b1", "w2", "b2", "K", "stream_id", "activation_type",
        "is_inference_mode_enabled", "is_softmax_over_topk", "norm_topk_probs", "concat_layout",
    ]  # fmt: skip


def test_names_of_activations():
    published = ["SWIGLU", "GEGLU", "REGLU", "RELU_SQ", "RELU", "GELU", "SILU"]
    gated = [is_glu(ActivationType[name]) for name in published]
    assert gated == [True, True, True, False, False, False, False]


def test_activations_by_value():
    assert all(parse_activation(a.value) is parse_activation(a) is a for a in ACTIVATIONS)
    for wrong in ("SwiGLU", 3, None):
        with pytest.raises(ValueError, match=r"activation_type: expected .+swiglu.+, got .+\. "):
            parse_activation(wrong)


def test_callers_may_pass_a_string_and_any_number_of_experts():
    given = make_inputs(CASE)
    token = torch.arange(30).repeat_interleave(2)
    pairs = given.x, given.scores.flatten(), token, given.ids.flatten()
    w1, w2 = _views(given.w1, given.w2)
    rest = w1, given.b1, w2, given.b2
    want, _ = sonicmoe.moe_general_routing_inputs(*pairs, *rest, 5, None, CASE.activation)
    got, _ = sonicmoe.moe_general_routing_inputs(*pairs, *rest, 99, None, "geglu")
    assert torch.equal(got, want)
    router = torch.randn(5, 16)
    want, *_ = sonicmoe.moe_TC_softmax_topk_layer(given.x, router, *rest, 2, None, CASE.activation)
    got, *_ = sonicmoe.moe_TC_softmax_topk_layer(given.x, router, *rest, 2, None, "geglu")
    assert torch.equal(got, want)


def test_name_of_the_library():
    assert LIBRARY_NAME == "sonicmoe"


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_pairs_in_any_order(shuffled, gate_up):
    case = Case(CASE.shape, torch.float32, CASE.activation, bias=True, gate_up=gate_up)
    given = make_inputs(case)
    order = torch.randperm(60) if shuffled else torch.arange(60)
    token = torch.arange(30, dtype=torch.int32).repeat_interleave(2)

    def published(x, ids, scores, w1, w2, b1, b2):
        w1, w2 = _views(w1, w2)
        out, counts = sonicmoe.moe_general_routing_inputs(
            x, scores.flatten()[order], token[order], ids.flatten()[order], w1, b1, w2, b2, 5, None,
            case.activation, concat_layout=gate_up == "concatenated",
        )  # fmt: skip
        assert torch.equal(counts.long(), ids.flatten().long().bincount(minlength=5))
        return out

    compare(
        run(published, given), run(plain(case), given), run(plain(case), given.double()), case.dtype
    )


def test_pairs_out_of_range_drop_out():
    """Tokens and experts that are not here, a token without pairs, one with more pairs than K."""
    given = make_inputs(Case("4,16,8,5,1", torch.float32))
    token = torch.tensor([2, 9, 0, -1, 2, 2, 0, 4])
    expert = torch.tensor([1, 1, 7, 2, 3, 1, -1, 0])
    scores = torch.rand(8, requires_grad=True)
    x = given.x.requires_grad_()
    out, counts = sonicmoe.moe_general_routing_inputs(
        x, scores, token, expert, *_general_weights(given), 5, None
    )
    ids = torch.full((4, 3), -1)
    ids[2] = torch.tensor([1, 3, 1])
    wide = torch.zeros(4, 3).index_put(
        (torch.tensor([2, 2, 2]), torch.arange(3)), scores[[0, 4, 5]]
    )
    want = reference.experts(x, ids, wide, given.w1, given.w2)
    torch.testing.assert_close(out, want)
    assert counts.tolist() == [0, 2, 0, 1, 0]
    dout = torch.randn_like(out)
    for got, right in zip(
        torch.autograd.grad(out, [x, scores], dout),
        torch.autograd.grad(want, [x, scores], dout),
        strict=True,
    ):
        torch.testing.assert_close(got, right)


def _general_weights(given):
    w1, w2 = _views(given.w1, given.w2)
    return w1, None, w2, None


@pytest.mark.parametrize(("over_topk", "norm"), [(True, False), (False, False), (False, True)])
def test_layer_with_its_router(over_topk, norm):
    given = make_inputs(CASE)
    router = torch.randn(5, 16, requires_grad=True)
    x = given.x.requires_grad_()
    w1, w2 = _views(given.w1, given.w2)
    out, logits, counts = sonicmoe.moe_TC_softmax_topk_layer(
        x, router, w1, given.b1, w2, given.b2, 2, None, CASE.activation, False, over_topk, norm
    )
    want_logits = x @ router.mT
    scores, ids = reference.route(want_logits, 2, over_topk, norm)
    want = plain(CASE)(x=x, ids=ids, scores=scores, **_named(given))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(logits, want_logits)
    assert torch.equal(counts.long(), ids.flatten().bincount(minlength=5))
    dout = torch.randn_like(out)
    for got, right in zip(
        torch.autograd.grad(out, [x, router], dout),
        torch.autograd.grad(want, [x, router], dout),
        strict=True,
    ):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def _named(given):
    return {"w1": given.w1, "w2": given.w2, "b1": given.b1, "b2": given.b2}


def test_inference_mode_keeps_nothing():
    given = make_inputs(CASE)
    kept = []
    w1, w2 = _views(given.w1.requires_grad_(), given.w2.requires_grad_())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out, logits, _ = sonicmoe.moe_TC_softmax_topk_layer(
            given.x, torch.randn(5, 16, requires_grad=True), w1, given.b1, w2, given.b2, 2, None,
            CASE.activation, is_inference_mode_enabled=True,
        )  # fmt: skip
    assert not kept and not out.requires_grad and not logits.requires_grad
