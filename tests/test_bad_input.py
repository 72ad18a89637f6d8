"""Every mistake is a ValueError that names the argument, what was expected, what came, a remedy."""

import re

import pytest
import torch

import sonicmoe
from sonicmoe import ActivationType, KernelBackendMoE, MoE
from sonicmoe.routing import TokenRounding
from sonicmoe.shapes import Problem

T, H, I, E, K = 6, 16, 8, 4, 2


def _experts(**wrong):
    good = {
        "x": torch.randn(T, H),
        "ids": torch.zeros(T, K, dtype=torch.int32),
        "scores": torch.rand(T, K),
        "w1": torch.randn(E, 2 * I, H),
        "w2": torch.randn(E, H, I),
        "b1": torch.randn(E, 2 * I),
        "b2": torch.randn(E, H),
    }
    return sonicmoe.experts(**good | wrong)


def _grouped(**wrong):
    good = {
        "rows": torch.randn(T, H),
        "counts": torch.ones(E, dtype=torch.int32),
        "w1": torch.randn(E, 2 * I, H),
        "w2": torch.randn(E, H, I),
    }
    return sonicmoe.grouped_experts(**good | wrong)


def _general(**wrong):
    good = {
        "x": torch.randn(T, H),
        "router_scores": torch.rand(3),
        "token_indices": torch.zeros(3, dtype=torch.int32),
        "expert_indices": torch.zeros(3, dtype=torch.int32),
        "w1": torch.randn(E, 2 * I, H).permute(1, 2, 0),
        "b1": None,
        "w2": torch.randn(E, H, I).permute(1, 2, 0),
        "b2": None,
        "E": E,
        "stream_id": None,
    }
    return sonicmoe.moe_general_routing_inputs(**good | wrong)


def _published(**wrong):
    good = {
        "x": torch.randn(T, H),
        "router_w": torch.randn(E, H),
        "w1": torch.randn(E, 2 * I, H).permute(1, 2, 0),
        "b1": None,
        "w2": torch.randn(E, H, I).permute(1, 2, 0),
        "b2": None,
        "K": K,
    }
    return sonicmoe.moe_TC_softmax_topk_layer(**good | wrong)


def _topk(logits=None, k=K, **options):
    return sonicmoe.topk_scores(torch.randn(T, E) if logits is None else logits, k, **options)


def _moe(call=None, x=None, **options):
    good = {
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "intermediate_size": I,
    }
    moe = MoE(**good | options)
    return moe(torch.randn(T, H) if x is None else x, **(call or {}))


def odd(h=H, i=I):
    """x and weights for sizes that are not what the layer asks for."""
    sizes = {"x": torch.randn(T, h), "w1": torch.randn(E, 2 * i, h), "w2": torch.randn(E, h, i)}
    return sizes | {"b1": None, "b2": None}


long, half, meta = torch.int64, torch.bfloat16, "meta"

# what is called, with which wrong arguments, the argument the message names, what it says came
WRONG = {
    # rank
    "x of rank 3": (_experts, {"x": torch.randn(1, T, H)}, "x", "(1, 6, 16)"),
    "w1 of rank 2": (_experts, {"w1": torch.randn(E, H)}, "w1", "(4, 16)"),
    "w2 of rank 4": (_experts, {"w2": torch.randn(1, E, H, I)}, "w2", "(1, 4, 16, 8)"),
    "ids of rank 1": (_experts, {"ids": torch.zeros(T, dtype=long)}, "ids", "(6,)"),
    "logits of rank 3": (_topk, {"logits": torch.randn(2, T, E)}, "logits", "(2, 6, 4)"),
    "published w1 of rank 2": (_general, {"w1": torch.randn(H, E)}, "w1", "(16, 4)"),
    # shape
    "x with another H": (_experts, {"x": torch.randn(T, 24)}, "x", "(6, 24)"),
    "w1 with another E": (_experts, {"w1": torch.randn(5, 2 * I, H)}, "w1", "(5, 16, 16)"),
    "w1 of a plain activation": (
        _experts, {"activation": ActivationType.RELU}, "w1", "(4, 16, 16)"),
    "w1 transposed": (_experts, {**odd(24, 8), "w1": torch.randn(E, 24, 16)}, "w1", "(4, 24, 16)"),
    "no experts": (
        _experts, {"w1": torch.randn(0, 2 * I, H), "w2": torch.randn(0, H, I)}, "w2", "(0, 16, 8)"),
    "b1 too short": (_experts, {"b1": torch.randn(E, I)}, "b1", "(4, 8)"),
    "b2 of one expert": (_experts, {"b2": torch.randn(H)}, "b2", "(16,)"),
    "ids of other tokens": (_experts, {"ids": torch.zeros(7, K, dtype=long)}, "ids", "(7, 2)"),
    "ids with no choice": (
        _experts, {"ids": torch.zeros(T, 0, dtype=long)}, "ids", "(6, 0)"),
    "scores of another K": (_experts, {"scores": torch.rand(T, 3)}, "scores", "(6, 3)"),
    "scores flat": (_experts, {"scores": torch.rand(T * K)}, "scores", "(12,)"),
    "grouped scores (R, 1)": (_grouped, {"scores": torch.rand(T, 1)}, "scores", "(6, 1)"),
    "grouped scores short": (_grouped, {"scores": torch.rand(T - 1)}, "scores", "(5,)"),
    "published pairs of other length": (
        _general, {"token_indices": torch.zeros(4, dtype=long)}, "token_indices", "(4,)"),
    # counts and offsets
    "counts too short": (_grouped, {"counts": torch.ones(3, dtype=long)}, "counts", "(3,)"),
    "counts as offsets": (_grouped, {"counts": torch.ones(5, dtype=long)}, "counts", "(5,)"),
    "offsets too short": (
        _grouped, {"counts": None, "offsets": torch.zeros(E, dtype=long)}, "offsets", "(4,)"),
    "counts in a list": (_grouped, {"counts": [1] * E}, "counts", "a list"),
    "offsets in a tuple": (
        _grouped, {"counts": None, "offsets": (0,) * (E + 1)}, "offsets", "a tuple"),
    "counts of floats": (_grouped, {"counts": torch.ones(E)}, "counts", "torch.float32"),
    "neither counts nor offsets": (_grouped, {"counts": None}, "counts", "neither"),
    "counts and E+1 offsets": (
        _grouped, {"offsets": torch.zeros(5, dtype=long)}, "offsets", "(5,)"),
    "starts without slots": (
        _experts, {"token_start": torch.zeros(T + 1, dtype=long)}, "token_start", "a tensor"),
    # dtype
    "integer x": (_experts, {"x": torch.ones(T, H, dtype=long)}, "x", "torch.int64"),
    "bf16 x": (_experts, {"x": torch.randn(T, H).to(half)}, "w1", "torch.float32"),
    "bf16 w2": (_experts, {"w2": torch.randn(E, H, I).to(half)}, "w2", "torch.bfloat16"),
    "bf16 b1": (_experts, {"b1": torch.randn(E, 2 * I).to(half)}, "b1", "torch.bfloat16"),
    "ids of floats": (_experts, {"ids": torch.zeros(T, K)}, "ids", "torch.float32"),
    "ids of int16": (_experts, {"ids": torch.zeros(T, K, dtype=torch.int16)}, "ids", "torch.int16"),
    "ids of bool": (_experts, {"ids": torch.zeros(T, K, dtype=torch.bool)}, "ids", "torch.bool"),
    "integer scores": (
        _experts, {"scores": torch.ones(T, K, dtype=long)}, "scores", "torch.int64"),
    "integer logits": (_topk, {"logits": torch.ones(T, E, dtype=long)}, "logits", "torch.int64"),
    "published float experts": (
        _general, {"expert_indices": torch.zeros(3)}, "expert_indices", "torch.float32"),
    # device
    "w1 elsewhere": (_experts, {"w1": torch.randn(E, 2 * I, H, device=meta)}, "w1", "meta"),
    "b2 elsewhere": (_experts, {"b2": torch.randn(E, H, device=meta)}, "b2", "meta"),
    "ids elsewhere": (
        _experts, {"ids": torch.zeros(T, K, dtype=long, device=meta)}, "ids", "meta"),
    "scores elsewhere": (_experts, {"scores": torch.rand(T, K, device=meta)}, "scores", "meta"),
    "counts elsewhere": (
        _grouped, {"counts": torch.ones(E, dtype=long, device=meta)}, "counts", "meta"),
    # sizes
    "K > E": (_topk, {"k": 5}, "k", "5"),
    "K = 0": (_topk, {"k": 0}, "k", "0"),
    "K < 0": (_topk, {"k": -1}, "k", "-1"),
    "K > E of the layer": (_moe, {"num_experts_per_tok": 5}, "num_experts_per_tok", "5"),
    "K < 1 of the layer": (_moe, {"num_experts_per_tok": 0}, "num_experts_per_tok", "0"),
    "H = 12": (_experts, odd(h=12), "H", "12"),
    "I = 12": (_experts, odd(i=12), "I", "12"),
    "I = 0": (_experts, odd(i=0), "I", "0"),
    "a shape of four": (Problem.parse, {"text": "1,2,3,4"}, "shape", "1,2,3,4"),
    "K of floats": (_topk, {"k": 2.0}, "k", "2.0"),
    "K of bool": (_topk, {"k": True}, "k", "True"),
    "E of the layer": (_moe, {"num_experts": 4.0}, "num_experts", "4.0"),
    "E < 1 of the layer": (_moe, {"num_experts": 0}, "num_experts", "0"),
    "E too large": (_moe, {"num_experts": 32768}, "num_experts", "32768"),
    "H of the layer": (_moe, {"hidden_size": -16}, "hidden_size", "-16"),
    "H of the layer, 12": (_moe, {"hidden_size": 12}, "hidden_size", "12"),
    "I of the layer": (_moe, {"intermediate_size": "8"}, "intermediate_size", "8"),
    "tile": (TokenRounding, {"num_experts": E, "k": K, "tile": 1.5}, "tile", "1.5"),
    "two tokens in a vector": (
        _moe, {"x": torch.randn(3, 2 * H)}, "hidden_states", "(3, 32)"),
    "half a token in a vector": (_moe, {"x": torch.randn(3, H // 2)}, "hidden_states", "(3, 8)"),
    "a scalar": (_moe, {"x": torch.randn(())}, "hidden_states", "()"),
    "bf16 tokens": (_moe, {"x": torch.randn(3, H).to(half)}, "router.weight", "torch.float32"),
    "integer tokens": (_moe, {"x": torch.ones(3, H, dtype=long)}, "x", "torch.int64"),
    "published router of other E": (
        _published, {"router_w": torch.randn(E + 1, H)}, "router_w", "(5, 16)"),
    "published router of other H": (
        _published, {"router_w": torch.randn(E, 2 * H)}, "router_w", "(4, 32)"),
    "published router of another dtype": (
        _published, {"router_w": torch.randn(E, H).to(half)}, "router_w", "torch.bfloat16"),
    # names
    "activation by name": (_experts, {"activation": "SwiGLU"}, "activation", "SwiGLU"),
    "activation of the layer": (
        _moe, {"activation_function": "SwiGLU"}, "activation_function", "SwiGLU"),
    "gate_up": (_experts, {"gate_up": "blocked"}, "gate_up", "blocked"),
    "gate_up of the layer": (_moe, {"gate_up": "concat"}, "gate_up", "concat"),
    "router": (_moe, {"router": "sinkhorn"}, "router", "sinkhorn"),
    "backend": (_experts, {"backend": "cuda"}, "backend", "cuda"),
    "backend of topk": (_topk, {"backend": "sonicmoe"}, "backend", "sonicmoe"),
    # kernels where there is no GPU
    "triton on the CPU": (_experts, {"backend": "triton"}, "backend", "cpu"),
    "a layer on the meta device": (_moe, {"device": meta}, "hidden_states", "weights on meta"),
    "data on the meta device": (
        _moe, {"x": torch.empty(T, H, device=meta)}, "hidden_states", "meta, weights on cpu"),
    "triton on the CPU, grouped": (_grouped, {"backend": "triton"}, "backend", "cpu"),
    "triton on the CPU, topk": (_topk, {"backend": "triton"}, "backend", "cpu"),
    "sonicmoe on the CPU": (
        _moe, {"call": {"kernel_backend_moe": KernelBackendMoE.sonicmoe}}, "backend", "cpu"),
    "scattermoe": (
        _moe, {"call": {"kernel_backend_moe": KernelBackendMoE.scattermoe}}, "kernel_backend_moe",
        "scattermoe"),
    "backend of the layer by name": (
        _moe, {"call": {"kernel_backend_moe": "triton"}}, "kernel_backend_moe", "triton"),
}  # fmt: skip


FORM = re.compile(r"(?P<argument>[\w. ]+): expected .+, got (?P<got>.+?)\. (?P<remedy>\S.+\.)")


@pytest.mark.parametrize("mistake", WRONG)
def test_message(mistake):
    call, wrong, argument, came = WRONG[mistake]
    with pytest.raises(ValueError) as raised:
        call(**wrong)
    said = FORM.fullmatch(str(raised.value))
    assert said, f"not of the form 'argument: expected …, got …. Remedy.': {raised.value}"
    assert said["argument"].split()[0].startswith(argument), str(raised.value)
    assert came in said["got"], str(raised.value)


def test_the_good_calls_are_good():
    """Or the table above would prove nothing."""
    for call in (_experts, _grouped, _general, _published, _topk, _moe):
        call()


@pytest.mark.parametrize("mistake", [m for m, row in WRONG.items() if row[0] is _experts])
def test_nothing_is_left_half_done(mistake):
    """No gradient and no argument has changed, and the next right call goes through."""
    wrong = {
        name: t.clone() if isinstance(t, torch.Tensor) else t
        for name, t in WRONG[mistake][1].items()
    }
    w1 = torch.randn(E, 2 * I, H, requires_grad=True)
    w1.grad = torch.ones_like(w1)
    before = w1.detach().clone()
    with pytest.raises(ValueError):
        _experts(**{"w1": w1} | wrong)
    assert torch.equal(w1, before) and torch.equal(w1.grad, torch.ones_like(w1))
    for name, t in WRONG[mistake][1].items():
        if isinstance(t, torch.Tensor) and not t.is_meta:
            assert torch.equal(t, wrong[name]), name
    _experts(w1=w1).sum().backward()
    assert not torch.equal(w1.grad, torch.ones_like(w1))
