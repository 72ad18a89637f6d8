"""Names of `experts_implementation`: which `register` takes, and which options they keep."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import NAME, close, small, step, with_backend
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from sonicmoe import ActivationType, MemoryPolicy
from sonicmoe.integrations import transformers as adapter
from sonicmoe.layer.memory import memory_policy
from sonicmoe.reference import quantize


@pytest.fixture(autouse=True)
def names_restored(monkeypatch):
    """`register` changes tables of transformers for the whole process."""
    interface = type(ALL_EXPERTS_FUNCTIONS)
    monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    monkeypatch.setattr(ALL_EXPERTS_FUNCTIONS, "_local_mapping", {})
    adapter.register()


@pytest.fixture
def calls(monkeypatch):
    """The options of every call of our experts."""
    seen, original = [], adapter.experts

    def recorded(*args, **options):
        seen.append(options)
        return original(*args, **options)

    monkeypatch.setattr(adapter, "experts", recorded)
    return seen


def test_experts_in_fp8():
    adapter.register("in_fp8", precision="fp8")
    model = small("Mixtral").bfloat16()
    got, want = step(with_backend(model, "in_fp8")), step(with_backend(model, NAME))
    for name in want:
        assert (got[name] - want[name]).norm() <= 0.25 * want[name].norm(), name
    name = "model.layers.1.mlp.experts.down_proj"
    assert (got[name] - want[name]).norm() >= 0.03 * want[name].norm()
    with pytest.raises(ValueError, match=r"^precision: expected 'fp8', 'fp8_bf16_dw' or None"):
        adapter.register(precision="fp16")


@pytest.mark.parametrize("family", ["Mixtral", "NemotronH"])
def test_kept_fp8_weights(family, monkeypatch):
    """NemotronH has no gates."""
    found, into = [], quantize.quantize_weight_into
    monkeypatch.setattr(
        quantize, "quantize_weight_into", lambda *a: found.append(a[-1]) or into(*a)
    )
    adapter.register("in_fp8", precision="fp8")
    adapter.register("kept_fp8", precision="fp8", cache_fp8_weights=True)
    model = small(family).bfloat16()
    layers = sum("down_proj" in name and p.dim() == 3 for name, p in model.named_parameters())
    kept, want = with_backend(model, "kept_fp8"), step(with_backend(model, "in_fp8"))
    optimizer = torch.optim.SGD(kept.parameters(), 0.1)
    for calls in (2 * layers, 0):
        found.clear()
        optimizer.zero_grad()
        got = step(kept)
        assert len(found) == calls
        for name in want:
            assert torch.equal(got[name], want[name]), name
    found.clear()
    optimizer.step()
    assert layers and len(found) == 2 * layers
    found.clear()
    optimizer.zero_grad()
    other = with_backend(copy.deepcopy(kept), "in_fp8")
    after, want = step(kept), step(other)
    assert not found and all(torch.equal(after[name], want[name]) for name in want)
    assert not any("fp8" in name for name in kept.state_dict())
    for m in kept.modules():
        if hasattr(m, "sonicmoe_fp8_weights"):
            assert m.sonicmoe_fp8_weights.is_kept
            assert not pickle.loads(pickle.dumps(m.sonicmoe_fp8_weights)).is_kept
    with pytest.raises(ValueError, match=r"^cache_fp8_weights: expected False without precision"):
        adapter.register("other", cache_fp8_weights=True)


def test_names_of_transformers_are_not_taken():
    taken = r"got 'sonicmoe', which is transformers\..*Pass replace=True to replace it"
    with pytest.raises(ValueError, match=taken):
        adapter.register("sonicmoe")
    with pytest.raises(ValueError, match="name: expected a name other than"):
        adapter.register("eager", replace=True)
    for name in ("", 3):
        with pytest.raises(ValueError, match="name: expected a string that is not empty"):
            adapter.register(name)
    adapter.register("another_name")
    adapter.register("another_name")


@pytest.mark.parametrize(
    "options",
    [{"precision": "fp8"}, {"memory": "fp8"}, {"memory": MemoryPolicy(slices=2)}],
    ids=str,
)
@pytest.mark.parametrize("replace", [False, True])
def test_other_options_do_not_reach_models_that_use_the_name(options, replace):
    model, ids = with_backend(small("Mixtral").bfloat16(), NAME), torch.arange(1, 17)[None]
    want = model(input_ids=ids).logits
    with pytest.raises(ValueError, match=f"with precision=None, .*another name.*'{NAME}_2'"):
        adapter.register(NAME, replace=replace, **options)
    assert torch.equal(model(input_ids=ids).logits, want)

    adapter.register("other", **options)
    adapter.register("other", replace=replace, **options)
    for changed in ({}, {"precision": "fp8_bf16_dw"}, {**options, "memory": "recompute"}):
        with pytest.raises(ValueError, match="got 'other', which models may use with precision="):
            adapter.register("other", **changed)


@pytest.mark.parametrize("memory", ["recompute", MemoryPolicy("e4m3", slices=2)], ids=str)
def test_memory_policy_of_a_name(memory, calls):
    adapter.register("frugal", memory=memory)
    adapter.register("frugal", memory=memory)
    model = small("Qwen3Moe")
    got, want = step(with_backend(model, "frugal")), step(with_backend(model, "eager"))
    assert [options["memory"] for options in calls] == [memory_policy(memory)] * 2
    for name in want:
        error = (got[name] - want[name]).norm() / want[name].norm().clamp_min(1e-12)
        assert error <= (1e-4 if memory == "recompute" else 0.06), name
    with pytest.raises(ValueError, match="memory: expected one of 'keep'"):
        adapter.register("frugal", memory="less")


@pytest.mark.tries("Hugging Face transformers", '`register("sonicmoe", replace=True)`')
@pytest.mark.parametrize("local", [False, True])
def test_the_name_of_transformers_can_be_replaced(local, calls):
    """GPT-OSS: what transformers has under this name takes the gate from `config.hidden_act`."""
    if local:
        ALL_EXPERTS_FUNCTIONS["sonicmoe"] = lambda *args: None
    adapter.register("sonicmoe", replace=True)
    model = small("GptOss")
    close(step(with_backend(model, "sonicmoe")), step(with_backend(model, "eager")))
    assert [options["activation"] for options in calls] == [ActivationType.SWIGLU_CLAMPED] * 2
