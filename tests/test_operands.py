"""Another precision is one class and one `register`: every entry point then runs it."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sonicmoe import MoE, distributed, experts, grouped_experts
from sonicmoe.layer.lora import LowRank
from sonicmoe.ops import kinds
from sonicmoe.ops.bf16 import Bf16

E, K, H, INNER, T, RANK = 4, 2, 16, 8, 12, 8


class Counted(Bf16):
    """Computes as `Bf16` does, and counts."""

    alignment = 4
    calls = 0

    @staticmethod
    def up(*args):
        Counted.calls += 1
        return Bf16.up(*args)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(kinds, "_kinds", dict(kinds._kinds))
    kinds.register("counted", Counted)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    scores, ids = torch.rand(T, E).topk(K, 1)
    w1, w2 = torch.randn(E, 2 * INNER, H), torch.randn(E, H, INNER)
    return torch.randn(T, H), ids, scores, w1, w2


def both(call):
    """What `call` returns with and without the new kind, which it must run."""
    before = Counted.calls
    found = call("counted")
    assert Counted.calls > before
    before = Counted.calls
    assert torch.equal(found, call(None))
    assert Counted.calls == before


def test_experts(tensors):
    both(lambda precision: experts(*tensors, precision=precision))


def test_lora(tensors):
    up = LowRank(torch.randn(RANK * E, H), torch.randn(2 * INNER, RANK * E))
    both(lambda precision: experts(*tensors, lora1=up, precision=precision))


def test_grouped_experts(tensors):
    x, _, _, *weights = tensors
    counts = torch.tensor([3, 0, 8, 1])
    both(lambda precision: grouped_experts(x, counts, *weights, precision=precision))


def test_moe(tensors):
    moe = MoE(E, K, H, INNER)

    def call(precision):
        moe.precision = precision
        return moe(tensors[0])[0]

    both(call)
    MoE(E, K, 20, 12, precision="counted")  # H and I as the kind wants them
    with pytest.raises(ValueError, match=r"hidden_size: expected a multiple of 4"):
        MoE(E, K, 18, 12, precision="counted")


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")
def test_expert_parallelism(tensors, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        both(lambda precision: distributed.experts(*tensors, group=group, precision=precision))
    finally:
        dist.destroy_process_group()


def hf_experts(precision, tensors):
    pytest.importorskip("transformers")
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import use_experts_implementation

    from sonicmoe.integrations.transformers import register

    name = f"operands_{precision}_{os.getpid()}"
    register(name, precision=precision)

    @use_experts_implementation
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.num_experts, self.act_fn = config, E, ACT2FN["silu"]
            self.gate_up_proj, self.down_proj = map(nn.Parameter, tensors[3:])

        def forward(self, *args):
            raise AssertionError("not our implementation")

    class Config:
        _experts_implementation = name

    return Experts(Config())


def test_transformers(tensors):
    x, ids, scores = tensors[:3]
    both(lambda precision: hf_experts(precision, tensors)(x, ids, scores))


def test_peft(tensors):
    peft = pytest.importorskip("peft")
    from sonicmoe.integrations.peft import use_lora_experts

    x, ids, scores = tensors[:3]

    def call(precision):
        torch.manual_seed(1)
        model = nn.ModuleDict({"experts": hf_experts(precision, tensors)})
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=RANK, target_parameters=targets, target_modules=[])
        config.init_lora_weights = False
        wrapped = peft.get_peft_model(model, config)
        assert use_lora_experts(wrapped) == 1
        return wrapped.base_model.model["experts"](x, ids, scores)

    both(call)


def test_an_unknown_name_lists_the_others(tensors):
    with pytest.raises(ValueError, match=r"precision: expected 'fp8', 'fp8_bf16_dw', 'counted' or"):
        experts(*tensors, precision="int4")
