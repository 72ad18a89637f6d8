"""Adapters on frozen experts against the layer with W + scale·B·A written out."""

import pytest
import torch
from helpers import Case, make_inputs, poisoned

import sonicmoe
from sonicmoe import ActivationType
from sonicmoe.integrations.lora import LowRank, lora_experts


def adapter(w, rank, scale):
    experts, out_size, in_size = w.shape
    a = torch.randn(rank * experts, in_size, dtype=w.dtype) / in_size**0.5
    b = torch.randn(out_size, rank * experts, dtype=w.dtype)
    return LowRank(a.requires_grad_(), b.requires_grad_(), scale)


def written_out(w, lora):
    """PEFT's own definition of the difference."""
    a = lora.a.reshape(w.shape[0], -1, w.shape[2])
    b = lora.b.reshape(w.shape[1], -1, w.shape[0])
    return w + lora.scale * torch.einsum("ore,eri->eoi", b, a)


CASES = [
    Case("24,16,8,4,2", torch.float64),
    Case("24,16,8,4,2", torch.float64, bias=True, gate_up="concatenated", transposed=True),
    Case("24,16,8,4,2", torch.float64, bias=True, routing="dropped"),
    Case("24,16,8,4,2", torch.float64, ActivationType.SWIGLU_CLAMPED, routing="one_expert"),
    Case("24,16,8,4,2", torch.float64, ActivationType.RELU_SQ, routing="all_dropped"),
    Case("0,16,8,4,2", torch.float64),
]


@pytest.mark.tries("LoRA", "every gradient against W + scale·B·A written out")
@pytest.mark.parametrize("rank", [8, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_layer_written_out(case, rank):
    given = make_inputs(case)
    given.scores = given.scores.double()
    lora1, lora2 = adapter(given.w1, rank, 0.5), adapter(given.w2, rank, 2.0)
    arguments = given.arguments()
    leaves = [
        given.x.requires_grad_(), given.scores.requires_grad_(),
        lora1.a, lora1.b, lora2.a, lora2.b,
    ]  # fmt: skip
    with poisoned():
        got = lora_experts(**arguments, lora1=lora1, lora2=lora2, **case.options)
        got_grads = torch.autograd.grad(got, leaves, given.dout)
    arguments |= {"w1": written_out(given.w1, lora1), "w2": written_out(given.w2, lora2)}
    want = sonicmoe.experts(**arguments, **case.options)
    torch.testing.assert_close(got, want)
    for a, b in zip(got_grads, torch.autograd.grad(want, leaves, given.dout), strict=True):
        torch.testing.assert_close(a, b)


def test_no_weight_is_kept_or_formed():
    """Beside the frozen weights themselves nothing of their size is kept."""
    case = Case("4,64,32,8,2", torch.float32)
    given, saved = make_inputs(case), []
    loras = adapter(given.w1, 8, 1.0), adapter(given.w2, 8, 1.0)

    def keep(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        lora_experts(**given.arguments(), lora1=loras[0], lora2=loras[1])
    frozen = {given.w1.data_ptr(), given.w2.data_ptr()}
    others = [t for t in saved if t.data_ptr() not in frozen]
    assert max(t.numel() for t in others) < given.w2.numel()


def test_weights_must_be_frozen():
    given = make_inputs(CASES[0])
    given.w1.requires_grad_()
    lora1, lora2 = adapter(given.w1.detach(), 8, 1.0), adapter(given.w2, 8, 1.0)
    with pytest.raises(ValueError, match="w1: expected a frozen tensor"):
        lora_experts(**given.arguments(), lora1=lora1, lora2=lora2)


def test_factors_must_fit():
    given = make_inputs(CASES[0])
    lora1, lora2 = adapter(given.w1, 8, 1.0), adapter(given.w2, 8, 1.0)
    with pytest.raises(ValueError, match="a of lora1: expected shape"):
        lora_experts(**given.arguments(), lora1=lora2, lora2=lora1)
