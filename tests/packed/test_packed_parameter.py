"""`PackedParameter`: reads are those of the dense weight, writes take effect or raise."""

import copy
import io

import pytest
import torch
from packed_weights import random_packed
from torch import nn

from sonicmoe.integrations.packed_parameter import PackedParameter, dequantize_experts

SHAPE = (3, 64, 96)


def parameter(format="mxfp4", shape=SHAPE, swapped=False, seed=0):
    made = PackedParameter(random_packed(format, shape, seed=seed), torch.bfloat16, swapped)
    return nn.Parameter(made, requires_grad=False)


def module(**weights):
    made = nn.Module()
    for name, weight in weights.items():
        made.register_parameter(name, weight)
    return made


def _zero_each(p):
    for expert in p:
        expert.zero_()


WRITES = {
    "p[2] = 0": lambda p: p.__setitem__(2, 0),
    "p[...] = 0": lambda p: p.__setitem__(..., 0),
    "data[2]": lambda p: p.data[2].zero_(),
    "data": lambda p: p.data.mul_(2),
    "data.copy_": lambda p: p.data.copy_(p.dequantize()),
    "data =": lambda p: setattr(p, "data", p.dequantize()),
    "data = of another shape": lambda p: setattr(p, "data", parameter(shape=(3, 96, 64))),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
    "view": lambda p: p.view(-1).fill_(1),
    "reshape": lambda p: p.reshape(-1).fill_(1),
    "mT": lambda p: p.mT.mul_(2),
    "view of a view": lambda p: p[0].mT[1:].zero_(),
    "iteration": _zero_each,
    "split": lambda p: p.split(1)[0].zero_(),
    "detach": lambda p: p[0].detach().zero_(),
    "init": lambda p: nn.init.normal_(p[0]),
    "init of all": lambda p: nn.init.zeros_(p),
    "out": lambda p: torch.add(p.dequantize(), 1, out=p),
    "out, a view": lambda p: torch.add(p.dequantize()[0], 1, out=p[0]),
    "foreach": lambda p: torch._foreach_mul_([p], 2),
    "foreach, a view": lambda p: torch._foreach_zero_([p[0]]),
    "set_": lambda p: p.set_(p.dequantize()),
    "masked_fill_": lambda p: p.masked_fill_(p.dequantize() > 0, 0),
}


@pytest.mark.parametrize("inference", [False, True])
def test_writes_raise(inference):
    p = parameter()
    before = p.dequantize()
    for name, write in WRITES.items():
        refused = pytest.raises(ValueError, match="packed experts")
        with torch.inference_mode(inference), torch.no_grad(), refused:
            write(p)
            pytest.fail(name)
    assert torch.equal(p.dequantize(), before)


@pytest.mark.parametrize("inference", [False, True])
def test_results_of_reads_are_plain(inference):
    p, x = parameter(), torch.randn(4, 96).bfloat16()
    dense = p.dequantize()
    reads = (
        lambda p: p + 0, lambda p: p[1] * 2, lambda p: x @ p[1].mT, lambda p: p[0].float(),
        lambda p: p.mT.contiguous(), lambda p: p.sum(), lambda p: p[dense > 0],
        lambda p: p[0].clone(), lambda p: nn.functional.linear(x, p[2]), lambda p: torch.cat([*p]),
    )  # fmt: skip
    with torch.inference_mode(inference):
        for read in reads:
            assert type(read(p)) is torch.Tensor and torch.equal(read(p), read(dense))
        assert repr(p[0]) == repr(dense[0])
    file = io.BytesIO()
    torch.save(p[0], file)
    file.seek(0)
    for copied in (copy.deepcopy(p[0]), torch.load(file)):
        assert type(copied) is torch.Tensor and torch.equal(copied, dense[0])


def test_data_takes_over_dtype_and_order():
    p, other = parameter(), parameter(shape=(3, 96, 64), swapped=True, seed=1)
    p.data = other.float()
    assert p.dtype is torch.float32 and torch.equal(p + 0, other.dequantize().float())


def test_copies_share_no_memory():
    p = parameter()
    before = p.dequantize()
    for copied in (p.float(), p.clone(), p.to(p.device, copy=True), copy.deepcopy(p)):
        copied.packed.blocks.zero_()
    assert torch.equal(p.dequantize(), before)


@pytest.mark.parametrize(
    "other", [{"shape": (3, 96, 64)}, {"format": "nf4 nested"}, {"format": "mxfp4"}]
)
def test_copying_another_form_raises(other):
    """NF4 of other sizes has codes of the same shape."""
    p = parameter("nf4")
    with pytest.raises(ValueError, match="packed experts of the same format and sizes"):
        p.copy_(parameter(**{"format": "nf4"} | other))


def test_shared_memory():
    made = module(w=parameter("nf4 nested"))
    made.share_memory()
    assert all(t.is_shared() for _, t in made.w.packed.tensors())


def test_dequantized_experts_stay_tied():
    p = parameter()
    model = nn.ModuleList([module(a=p, b=parameter(seed=1)), module(a=p)])
    assert dequantize_experts(model) == 3
    assert model[0].a is model[1].a and model[0].a is not model[0].b
    assert torch.equal(model[0].a, p.dequantize())


# --- scales for FP8 -------------------------------------------------------------------------------
CHANGES = {
    "in place": lambda p: p.packed.blocks.zero_(),
    "of a scale": lambda p: p.packed.scales.add_(1),
    "copy_": lambda p: p.copy_(parameter(seed=1)),
    "data.copy_": lambda p: p.data.copy_(parameter(seed=1)),
    "load_state_dict": lambda p: module(w=p).load_state_dict({"w": parameter(seed=1)}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_scales_for_fp8_go_when_the_weight_changes(change):
    p = parameter()
    p.packed = p.packed.for_fp8()
    assert p.packed.stored().w_norm is not None
    assert copy.deepcopy(p).packed.fp8 is None  # PyTorch counts its changes anew
    with torch.no_grad():
        CHANGES[change](p)
    assert p.packed.fp8 is None and p.packed.stored().w_norm is None


@pytest.mark.parametrize("format", ["mxfp4", "nf4", "fp8", "int4"])
def test_scales_for_fp8_move_and_are_not_those_of_the_transpose(format):
    w = random_packed(format, SHAPE).for_fp8()
    moved = w.to("cpu")
    assert all(torch.equal(a, b) for a, b in zip(moved.fp8, w.fp8, strict=True))
    assert w.mT.fp8 is None and w.mT.stored().w_norm is None
    assert all(t.device.type == "meta" for t in w.to("meta").fp8)
