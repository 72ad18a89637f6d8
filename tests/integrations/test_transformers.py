"""Small random models of transformers: our backend against `eager`, which is their own loop."""

import copy
import gc
import operator
import weakref
from collections import Counter
from types import MethodType

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers")

from hf_models import MODELS, NAME, close, small, step, with_backend
from transformers.activations import ACT2FN

from sonicmoe import ActivationType
from sonicmoe.integrations import recognition
from sonicmoe.integrations import transformers as adapter


@pytest.fixture(autouse=True)
def registered():
    adapter.register()


@pytest.fixture
def calls(monkeypatch):
    """How often our experts ran: a model that falls back to its own loop would pass unseen."""
    seen, original = [], adapter.experts

    def counted(*args, **kwargs):
        seen.append(kwargs["activation"])
        return original(*args, **kwargs)

    monkeypatch.setattr(adapter, "experts", counted)
    return seen


@pytest.mark.tries("Hugging Face transformers", "every gradient of seven models")
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name, calls):
    model = small(name)
    got = step(with_backend(model, NAME))
    layers = 1 if name in ("DeepseekV3", "NemotronH") else 2
    special = {"GptOss": ActivationType.SWIGLU_CLAMPED, "NemotronH": ActivationType.RELU_SQ}
    assert calls == [special.get(name, ActivationType.SWIGLU)] * layers
    close(got, step(with_backend(model, "eager")))
    experts = [n for n in got if "experts" in n and "shared" not in n]
    assert len(experts) >= 2 * layers and all(got[n].any() for n in experts)


@pytest.mark.tries("Hugging Face transformers", "gradient checkpointing")
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing(name, runs):
    """The down projection runs again only where a shared expert follows."""
    model = with_backend(small(name), NAME)
    want = step(model)
    once = Counter(runs)
    runs.clear()
    model.zero_grad(set_to_none=True)
    model.train()
    model.gradient_checkpointing_enable()
    close(step(model), want)
    assert runs["up"] == 2 * once["up"]
    assert runs["down"] == once["down"] * (1 + (name in ("DeepseekV3", "NemotronH")))


@pytest.mark.tries("Hugging Face transformers", "`from_pretrained`, `generate`")
@pytest.mark.parametrize("name", MODELS)
def test_save_reload_and_generate(name, tmp_path):
    model = small(name).eval()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(
        tmp_path, experts_implementation=NAME, attn_implementation="eager"
    ).eval()  # fmt: skip
    assert again.config._experts_implementation == NAME
    prompt = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(2))
    options = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(prompt))
    want = with_backend(model, "eager").generate(prompt, **options)
    assert torch.equal(again.generate(prompt, **options), want)


@pytest.mark.tries("Hugging Face transformers", "autocast, bf16")
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_autocast_and_bf16(name, calls):
    model = small(name)
    ids = torch.randint(1, 64, (2, 16))
    exact = model(input_ids=ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        mixed = with_backend(model, NAME)(input_ids=ids).logits
    low = with_backend(model, NAME).bfloat16()(input_ids=ids).logits
    assert len(calls) == 4
    for logits in (mixed, low):
        assert (logits.float() - exact).norm() < 0.1 * exact.norm()


@pytest.mark.tries("Hugging Face transformers", "`torch.compile`")
@pytest.mark.parametrize("name", MODELS)
def test_compiled_without_a_graph_break(name):
    """What is compiled for one layer serves all layers of the model."""
    model = with_backend(small(name), NAME)
    blocks = [module for module in model.modules() if hasattr(module, "has_gate")]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    x, ids, scores = torch.randn(12, 32), torch.randint(4, (12, 2)), torch.rand(12, 2)
    for block in blocks:
        compiled = torch.compile(block, fullgraph=True, backend=counter)
        torch.testing.assert_close(compiled(x, ids, scores), block(x, ids, scores))
    assert blocks and counter.frame_count == 1


def test_absent_experts_drop_out():
    """transformers marks experts of other ranks with the number of local experts, and weight 0."""
    block = with_backend(small("Mixtral"), NAME).model.layers[0].mlp.experts
    x, scores = torch.randn(12, 32), torch.rand(12, 2)
    ids = torch.randint(5, (12, 2))
    here = ids < 4
    with torch.no_grad():
        got = block(x, ids, torch.where(here, scores, torch.nan))
        want = block(x, ids.clamp(max=3), scores * here)
    torch.testing.assert_close(got, want)


def test_parts_of_the_experts_sum_to_the_whole():
    block = with_backend(small("Mixtral"), NAME).model.layers[0].mlp.experts
    x, ids, scores = torch.randn(12, 32), torch.randint(4, (12, 2)), torch.rand(12, 2)
    whole, parts = block(x, ids, scores), 0
    for rank in range(2):
        part = copy.deepcopy(block)
        part.num_experts = 2
        for name in ("gate_up_proj", "down_proj"):
            setattr(part, name, torch.nn.Parameter(getattr(block, name)[2 * rank : 2 * rank + 2]))
        here = ids // 2 == rank
        parts = parts + part(x, torch.where(here, ids % 2, 2), scores * here)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(
    ("hidden_act", "activation"),
    [
        ("silu", "SWIGLU"), ("swish", "SWIGLU"), ("gelu", "GEGLU"), ("relu", "REGLU"),
        ("gelu_pytorch_tanh", "GEGLU_TANH"), ("gelu_new", "GEGLU_TANH"),
    ],
)  # fmt: skip
def test_activation_is_recognised(hidden_act, activation, calls):
    model = small("Mixtral", hidden_act=hidden_act)
    close(step(with_backend(model, NAME)), step(with_backend(model, "eager")))
    assert calls[0] is ActivationType[activation]


@pytest.mark.parametrize("hidden_act", ["quick_gelu", "relu6", "tanh", "prelu"])
def test_unknown_activation_raises(hidden_act):
    model = with_backend(small("Mixtral", hidden_act=hidden_act), NAME)
    with pytest.raises(ValueError, match=r"another one in MixtralExperts\. Load this model with"):
        step(model)


@pytest.mark.parametrize("limit", [5.0, 6.3, 12, 1e4])
def test_another_clamp_is_recognised(limit, calls):
    model = small("GptOss")
    for layer in model.model.layers:
        layer.mlp.experts.limit = limit
        layer.mlp.experts.gate_up_proj.data *= 20
    close(step(with_backend(model, NAME)), step(with_backend(model, "eager")))
    assert calls[0] is ActivationType.clamped_swiglu(limit, alpha=1.702, offset=1)


class _SoftCapped(torch.nn.Module):
    """As in Inkling 2: caps in modules of their own, computed in fp32."""

    def __init__(self, gate, up):
        super().__init__()
        self.gate, self.up = _Cap(gate), _Cap(up)

    def forward(self, gate, up):
        value = self.gate(gate.float()) * gate.float().sigmoid() * self.up(up.float())
        return value.to(gate.dtype)


class _Cap(torch.nn.Module):
    def __init__(self, cap):
        super().__init__()
        self.cap = cap

    def forward(self, x):
        return self.cap * torch.tanh(x / self.cap)


def _of_both(self, gate_up):
    return self.act_fn(*gate_up.chunk(2, dim=-1))


@pytest.fixture
def block(monkeypatch):
    """Experts whose gate takes both halves."""
    found = with_backend(small("Mixtral"), NAME).model.layers[0].mlp.experts
    monkeypatch.setattr(type(found), "_apply_gate", _of_both)
    return found


@pytest.mark.parametrize("caps", [(4.0, 25.0), (1.5, 2.5), (30.0, 0.3), (7.12345, 100.0)])
def test_soft_caps_are_recognised(caps, block, calls):
    block.act_fn = _SoftCapped(*caps)
    block(torch.randn(12, 32), torch.randint(4, (12, 2)), torch.rand(12, 2))
    assert calls == [ActivationType.soft_capped_swiglu(*caps)]


def test_changed_soft_caps_are_noticed(block, calls):
    block.act_fn = _SoftCapped(4.0, 25.0)
    given = torch.randn(12, 32), torch.randint(4, (12, 2)), torch.rand(12, 2)
    block(*given)
    block.act_fn.up.cap = 5.0
    block(*given)
    block.act_fn.gate = _Cap(3.0)
    block(*given)
    assert block in recognition._known
    wanted = [ActivationType.soft_capped_swiglu(*caps) for caps in ((4, 25), (4, 5), (3, 5))]
    assert calls == wanted


def _two_limits(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=6)) * up.clamp(-7, 7)


def _limit_behind_the_activation(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).clamp(max=7) * up.clamp(-7, 7)


def _limit_on_one_side(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=7)) * up.clamp(max=7)


@pytest.mark.parametrize("gate", [_two_limits, _limit_behind_the_activation, _limit_on_one_side])
def test_a_gate_that_is_almost_a_clamp_raises(gate, monkeypatch):
    block = with_backend(small("Mixtral"), NAME).model.layers[0].mlp.experts
    monkeypatch.setattr(type(block), "_apply_gate", gate)
    with pytest.raises(ValueError, match="another one in MixtralExperts"):
        block(torch.randn(12, 32), torch.randint(4, (12, 2)), torch.rand(12, 2))


def _another_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def _set(name, value):
    """A change of an attribute of the experts or, with a dot in its name, of a module in there."""

    def change(block):
        owner, _, attribute = name.rpartition(".")
        owner = operator.attrgetter(owner)(block) if owner else block
        setattr(owner, attribute, copy.deepcopy(value))

    return change


_same, _clamped = _set("unused", None), ActivationType.SWIGLU_CLAMPED
_five = ActivationType.clamped_swiglu(5.0, alpha=1.702, offset=1.0)
_one = ActivationType.clamped_swiglu(7.0, alpha=1.0, offset=1.0)
# The model; changes, each with the activation that follows; None: not one of ours.
CHANGES = {
    "limit": ("GptOss", (_set("limit", 5.0), _five), (_set("limit", 7.0), _clamped),
              (_set("limit", -1.0), None), (_set("limit", 5.0), _five)),
    "alpha": ("GptOss", (_same, _clamped), (_set("alpha", 1.0), _one)),
    "act_fn": ("Mixtral", (_same, "SWIGLU"), (_set("act_fn", torch.nn.GELU()), "GEGLU")),
    "number of act_fn": (
        "Mixtral", (_set("act_fn", torch.nn.LeakyReLU(0.0)), "REGLU"),
        (_set("act_fn.negative_slope", 0.5), None)),
    "string of act_fn": (
        "Mixtral", (_set("act_fn", torch.nn.GELU()), "GEGLU"),
        (_set("act_fn.approximate", "tanh"), "GEGLU_TANH")),
    "function of act_fn": (
        "Mixtral", (_set("act_fn", ACT2FN["gelu"]), "GEGLU"),
        (_set("act_fn.act", torch.nn.functional.silu), "SWIGLU")),
    "module within act_fn": (
        "Mixtral", (_set("act_fn", torch.nn.Sequential(torch.nn.LeakyReLU(0.5))), None),
        (_set("act_fn.0.negative_slope", 0.0), "REGLU"),
        (_set("act_fn.0.negative_slope", 0.5), None)),
    "gate of the module": (
        "Mixtral", (_same, "SWIGLU"),
        (lambda b: setattr(b, "_apply_gate", MethodType(_another_gate, b)), "GEGLU")),
}  # fmt: skip


def _check_changes(name, *changes, calls, compiled):
    block = next(m for m in with_backend(small(name), NAME).modules() if hasattr(m, "has_gate"))
    given = torch.randn(12, 32), torch.randint(4, (12, 2)), torch.rand(12, 2)
    torch._dynamo.reset()
    run = torch.compile(block, backend="eager", fullgraph=True) if compiled else block
    for change, activation in changes:
        change(block)
        for _ in range(2):
            if activation is None:
                with pytest.raises(Exception, match="experts: expected an activation among"):
                    run(*given)
            else:
                run(*given)
                named = isinstance(activation, str)
                assert calls.pop() is (ActivationType[activation] if named else activation)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_calls_are_noticed(change, calls):
    _check_changes(*CHANGES[change], calls=calls, compiled=False)


@pytest.mark.parametrize(
    "change", ["limit", "act_fn", "module within act_fn", "gate of the module"]
)
def test_changes_between_compiled_calls_are_noticed(change, calls):
    _check_changes(*CHANGES[change], calls=calls, compiled=True)


def test_a_gate_replaced_on_the_class_is_noticed(monkeypatch, calls):
    block = with_backend(small("Mixtral"), NAME).model.layers[0].mlp.experts
    given = torch.randn(12, 32), torch.randint(4, (12, 2)), torch.rand(12, 2)
    block(*given)
    monkeypatch.setattr(type(block), "_apply_gate", _another_gate)
    block(*given)
    assert calls == [ActivationType.SWIGLU, ActivationType.GEGLU]


def test_a_module_is_recognised_once_and_not_kept_alive(monkeypatch):
    block = with_backend(small("GptOss"), NAME).model.layers[0].mlp.experts
    seen, original = [], recognition._recognise
    monkeypatch.setattr(recognition, "_recognise", lambda *a: seen.append(a) or original(*a))
    for _ in range(3):
        block(torch.randn(12, 32), torch.randint(4, (12, 2)), torch.rand(12, 2))
    assert len(seen) == 1 and block in recognition._known
    found = weakref.ref(block)
    del block, seen[:]
    gc.collect()
    assert found() is None


def test_nothing_of_the_recognition_is_left_in_the_compiled_graph():
    block = with_backend(small("GptOss"), NAME).model.layers[0].mlp.experts
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    compiled(torch.randn(12, 32), torch.randint(4, (12, 2)), torch.rand(12, 2))
    operators = {str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"}
    ours = {name for name in operators if name.startswith("sonicmoe.")}
    assert len(ours) == 3 and operators - ours <= {
        "aten.transpose.int",
        "<built-in function getitem>",
    }


def test_flags_that_contradict_the_gate_raise():
    model = with_backend(small("Mixtral"), NAME)
    model.model.layers[0].mlp.experts.is_concatenated = False
    with pytest.raises(ValueError, match="expected an activation among"):
        step(model)


@pytest.mark.parametrize("weights", [3, 5])
def test_another_number_of_experts_than_the_module_says_raises(weights):
    """Tokens of experts without weights would be left out of the sum."""
    block = with_backend(small("Mixtral"), NAME).model.layers[0].mlp.experts
    block.gate_up_proj = torch.nn.Parameter(torch.randn(weights, 32, 32))
    block.down_proj = torch.nn.Parameter(torch.randn(weights, 32, 16))
    with pytest.raises(ValueError, match=r"gate_up_proj: expected the weights of 4 experts"):
        block(torch.randn(12, 32), torch.randint(4, (12, 2)), torch.rand(12, 2))


def test_norm_behind_the_experts():
    """As in MuseSpark; experts that are absent add nothing, whatever their weight."""
    block = with_backend(small("Mixtral"), NAME).model.layers[0].mlp.experts
    block.has_post_expert_norm, block.post_expert_norm = True, torch.nn.LayerNorm(32)
    x, ids, scores = torch.randn(12, 32), torch.randint(5, (12, 2)), torch.rand(12, 2)
    got = block(x, ids, torch.where(ids < 4, scores, torch.nan))
    block.has_post_expert_norm = False
    want = torch.zeros(12, 32)
    for k in range(2):
        one = block.post_expert_norm(block(x, ids[:, k : k + 1], torch.ones(12, 1)))
        want += torch.where(ids[:, k : k + 1] < 4, one * scores[:, k : k + 1], 0)
    torch.testing.assert_close(got, want)


def test_experts_without_a_gate():
    """As in Nemotron-H: up_proj alone, with the activation between."""
    block = with_backend(small("Mixtral", hidden_act="relu2"), NAME).model.layers[0].mlp.experts
    block.has_gate = False
    block.up_proj = torch.nn.Parameter(torch.randn(4, 16, 32))
    x, ids, scores = torch.randn(6, 32), torch.randint(4, (6, 1)), torch.ones(6, 1)
    want = [
        block.down_proj[e] @ torch.relu(block.up_proj[e] @ t) ** 2
        for t, e in zip(x, ids[:, 0], strict=True)
    ]
    torch.testing.assert_close(block(x, ids, scores), torch.stack(want), rtol=1e-4, atol=1e-4)
