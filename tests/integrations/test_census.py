"""Our implementation on every class of experts that the installed transformers has."""

from importlib.metadata import version

import pytest
import torch

pytest.importorskip("transformers")

import census
from census import imported, sources
from hf_models import NAME
from torch import nn
from transformers import PreTrainedModel

from sonicmoe import report
from sonicmoe.integrations import transformers as adapter


@pytest.fixture(autouse=True)
def registered():
    adapter.register()


@pytest.mark.tries("Hugging Face transformers", "every class of experts")
@pytest.mark.parametrize("expert", census.experts(), ids=str)
def test_agrees_with_eager_or_raises(expert, monkeypatch):
    calls, original = [], adapter.experts
    monkeypatch.setattr(adapter, "experts", lambda *a, **k: calls.append(a) or original(*a, **k))
    block = census.build(expert)
    assert described(block, "eager").runs == "transformers' eager"
    layer = described(block, NAME)
    assert layer.runs == "sonicmoe"
    if census.gate(block) is None:  # a gate that we do not have; the table names it
        with pytest.raises(ValueError, match="Load this model with experts_implementation="):
            census.step(block, NAME)
        assert "Load this model with experts_implementation=" in layer.problem
        return
    got, want = census.step(block, NAME), census.step(block, "eager")
    (call,) = calls
    assert all(t.any() for t in want.values())
    assert (layer.experts, layer.hidden_size, layer.intermediate_size) == call[4].shape
    for name, difference in census.differences(got, want).items():
        assert difference < census.TOLERANCE, f"{name}: {difference:.1e}"


def described(block, implementation: str):
    """What the report says of experts in a block."""
    block.config._experts_implementation = implementation
    (layer,) = report(nn.ModuleDict({"experts": block})).layers
    return layer


def test_the_comparison_can_fail():
    block = census.build(next(e for e in census.experts() if e.name == "DeepseekV4Experts"))
    want = census.step(block, "eager")
    block.limit = 1e5
    without = census.differences(census.step(block, "eager"), want)
    assert min(without.values()) > 1e-3, "no limit was reached"


def models(module: str) -> list[type]:
    found = vars(imported(module)).values()
    return [
        value
        for value in found
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__.endswith(module)
    ]


@pytest.mark.parametrize("module", census.without_interface())
def test_without_the_interface_our_name_is_refused(module):
    assert models(module)
    for model in models(module):
        with pytest.raises(
            ValueError, match=r"^experts_implementation: expected None .* Load this"
        ):
            adapter._check_interface(model)


DEFAULTS = {"moe_num_experts": 2, "rope_theta": 1e4}  # the configuration of Dbrx has none
SIZED = {
    "dbrx": ("DbrxModel", {"n_layers": 1, "attn_config": DEFAULTS, "ffn_config": DEFAULTS}),
    "doge": ("DogeModel", {"num_hidden_layers": 1, "is_moe": True}),
    "jetmoe": ("JetMoeModel", {"num_hidden_layers": 1}),
    "llama4": ("Llama4TextModel", {"num_hidden_layers": 1}),
    "longcat_flash": ("LongcatFlashModel", {"num_layers": 1, "n_routed_experts": 2}),
    "nllb_moe": ("NllbMoeEncoder", {"encoder_layers": 1, "encoder_sparse_step": 1}),
    "step3p7": ("Step3p7TextModel", {"num_hidden_layers": 4, "layer_types": None}),
    "switch_transformers": (
        "SwitchTransformersStack",
        {"num_layers": 2, "num_sparse_encoder_layers": 1},
    ),
    "vitpose_backbone": ("VitPoseBackbone", {"num_hidden_layers": 1, "num_experts": 2}),
}


@pytest.mark.parametrize("module", census.without_interface())
def test_the_report_of_a_model_without_the_interface(module):
    name, options = SIZED[census.family(module)]
    kind = getattr(imported(module), name)
    with torch.device("meta"):
        model = kind(kind.config_class(**options))
    layers = report(model).layers
    assert {layer.runs for layer in layers} == {"transformers"}
    assert all("computes its experts itself" in layer.why for layer in layers)
    assert len(layers) == (2 if name == "JetMoeModel" else 1)  # its attention has experts too


def test_no_other_family_is_refused():
    """Read from the source, since importing all families takes minutes."""
    refused = {
        module
        for module, source in sources().items()
        if adapter._own_experts(source) and "@use_experts_implementation" not in source
    }
    assert refused == set(census.without_interface())


def test_classes_of_experts_in_files_with_the_interface_use_it():
    """A family may have routed experts of both kinds; those of the other kind would be ignored."""
    decorated = {e.name for e in census.experts()}
    others = {
        name
        for source in sources().values()
        if "@use_experts_implementation" in source
        for name in adapter._own_experts(source)
        if "Experts" in name
    }
    assert others - decorated <= {"InklingSharedExperts"}  # not routed


def test_table_in_the_document_is_current():
    if version("transformers") not in census.written():
        pytest.skip(f"the table is that of another version than {version('transformers')}")
    assert census.written() == census.table(), "run `python tests/support/census.py`"


# --- asking for it --------------------------------------------------------------------------------
SIZES = dict(
    vocab_size=32, hidden_size=16, intermediate_size=16, intermediate_size_mlp=16,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    num_local_experts=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def llama4(tmp_path_factory):
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    folder = tmp_path_factory.mktemp("llama4")
    Llama4ForCausalLM(Llama4TextConfig(**SIZES)).save_pretrained(folder)
    return folder


def test_from_pretrained_refuses(llama4):
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match="a name for Llama4ForCausalLM, where Llama4TextExperts"):
        AutoModelForCausalLM.from_pretrained(llama4, experts_implementation=NAME)
    AutoModelForCausalLM.from_pretrained(llama4)
    AutoModelForCausalLM.from_pretrained(llama4, experts_implementation="eager")


def test_set_experts_implementation_refuses(llama4):
    """Also for a model inside another one, and for a class that is derived elsewhere."""
    from transformers import Llama4ForCausalLM, PreTrainedConfig

    class Derived(Llama4ForCausalLM):
        pass

    class Outer(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, inner):
            super().__init__(PreTrainedConfig())
            self.inner = inner

    for kind in (Llama4ForCausalLM, Derived):
        inner = kind.from_pretrained(llama4, experts_implementation="eager")
        for model in (inner, Outer(inner)):
            with pytest.raises(ValueError, match="where Llama4TextExperts computes the experts"):
                model.set_experts_implementation(NAME)


def test_dense_models_are_left_alone():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, experts_implementation=NAME))
    model.set_experts_implementation(NAME)
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
