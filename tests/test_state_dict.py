"""State dicts of `MoE` note the order of gate and up columns, in their metadata alone."""

import copy
import io

import pytest
import torch
from torch import nn

from sonicmoe import ActivationType, MoE

LAYOUTS = ["interleaved", "concatenated"]
SIZES = (5, 2, 16, 8)


class Model(nn.Module):
    def __init__(self, gate_up: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoE(*SIZES, gate_up=gate_up, shared_intermediate_size=8) for _ in range(2)
        )


def _saved(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("path", [lambda s: s, copy.deepcopy, _saved], ids=["", "copied", "saved"])
@pytest.mark.parametrize("gate_up", LAYOUTS)
def test_another_order_is_refused(gate_up, path):
    """In a model, for each way of loading; nothing of the layer has changed then."""
    other = Model(LAYOUTS[1 - LAYOUTS.index(gate_up)])
    weights = path(Model(gate_up).state_dict())
    before = {name: t.clone() for name, t in other.state_dict().items()}
    for options in ({}, {"strict": False}, {"assign": True}):
        with pytest.raises(ValueError, match=f"gate_up: expected '{gate_up}', the order of the"):
            other.load_state_dict(weights, **options)
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())
    Model(gate_up).load_state_dict(weights)


def test_no_key_is_added_and_none_is_needed():
    """As in safetensors, or in a dict that was put together by hand."""
    weights = Model("interleaved").state_dict()
    assert not [name for name in weights if "gate_up" in name]
    plain = dict(weights)
    for gate_up in LAYOUTS:
        model = Model(gate_up)
        assert str(model.load_state_dict(plain)) == "<All keys matched successfully>"
        assert all(torch.equal(t, plain[name]) for name, t in model.state_dict().items())


def test_a_plain_dict_may_receive_the_weights():
    assert set(MoE(*SIZES).state_dict(destination={})) == set(MoE(*SIZES).state_dict())


def test_an_ungated_layer_has_no_order():
    options = {"activation_function": ActivationType.RELU_SQ}
    weights = MoE(*SIZES, **options, gate_up="concatenated").state_dict()
    MoE(*SIZES, **options).load_state_dict(weights)


def test_the_order_can_be_set_before_loading():
    moe = MoE(*SIZES)
    moe.gate_up = "concatenated"
    moe.load_state_dict(MoE(*SIZES, gate_up="concatenated").state_dict())
