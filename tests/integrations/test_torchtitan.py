"""torchtitan's GroupedExperts and ours in its place, under the same weights and gradients."""

import re
import shlex
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan", reason="comes with the extra 'titan'")

import titan
from torchtitan.config import ConfigManager, apply_overrides
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from sonicmoe.integrations import torchtitan as adapter

README = (Path(__file__).parents[2] / "README.md").read_text()
COUNTS = [[50, 0, 90, 31], [0, 0, 170, 0], [0, 0, 0, 0]]


def step(module, x, counts, dout) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    names, weights = zip(*module.named_parameters(), strict=True)
    out = module(x, counts)
    dx, *grads = torch.autograd.grad(out, [x, *weights], dout)
    found = titan.by_stock_name(dict(zip(names, grads, strict=True)))
    return {"out": out.detach(), "x": dx, **found}


@pytest.mark.tries("torchtitan", "every gradient of `GroupedExperts`")
@pytest.mark.parametrize("tail", [0, 6])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("override", titan.OVERRIDES)
def test_output_and_every_gradient(override, counts, tail):
    """Rows beyond the counts hold NaN: neither read nor written to."""
    stock, ours = (layer.inner_experts for layer in titan.stock_and_ours(override))
    used, counts = sum(counts), torch.tensor(counts)
    x, dout = torch.randn(2, used + tail, titan.D)
    x[used:] = torch.nan
    dout[used:] = torch.nan
    got = step(ours, x, counts, dout)
    for name in ("out", "x"):
        assert (got[name][used:] == 0).all()
        got[name] = got[name][:used]
    weights = [getattr(stock, name) for name in titan.NAMES]
    exact = titan.in_fp64(
        lambda x, *w: titan.written_out(x, counts, *w), x[:used], *weights, dout=dout[:used]
    )
    exact = dict(zip(("out", "x", *titan.NAMES), exact, strict=True))
    titan.within_budget(got, step(stock, x[:used], counts, dout[:used]), exact, used)


@pytest.mark.tries("torchtitan", "model checkpoints")
@pytest.mark.parametrize("override", titan.OVERRIDES)
def test_state_dict_round_trip(override):
    stock, ours = titan.stock_and_ours(override)
    want, saved = stock.state_dict(), ours.state_dict()
    assert saved.keys() == want.keys()
    again = titan.layer_config().build()
    again.load_state_dict(saved)
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, want[name]), name


def test_parameters_keep_their_names():
    stock, ours = (layer.inner_experts for layer in titan.stock_and_ours("experts"))
    shapes = {name: p.shape for name, p in stock.named_parameters()}
    assert {name: p.shape for name, p in ours.named_parameters()} == shapes
    fused = titan.stock_and_ours("fused_experts")[1].inner_experts
    assert {name for name, _ in fused.named_parameters()} == {"w13", "w2_EDF"}


@pytest.mark.parametrize("override", titan.OVERRIDES)
def test_what_is_kept(override):
    """Beside the parameters: one joined copy of gate and up, or no weight at all."""
    ours, saved = titan.stock_and_ours(override)[1].inner_experts.bfloat16(), []

    def keep(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        ours(torch.randn(4, titan.D).bfloat16(), torch.tensor([1, 1, 1, 1]))
    own = {p.untyped_storage().data_ptr() for p in ours.parameters()}
    copies = [t for t in saved if t.dim() == 3 and t.untyped_storage().data_ptr() not in own]
    joined = 4 * titan.EXPERTS * 16 * titan.D  # bytes, as the docstring says
    assert sum(t.nbytes for t in copies) == (joined if override == "experts" else 0)


@pytest.mark.tries("torchtitan", "`torch.compile`")
@pytest.mark.parametrize("override", titan.OVERRIDES)
def test_compiled_without_a_graph_break(override):
    ours = titan.stock_and_ours(override)[1].inner_experts
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    counts = torch.tensor([5, 0, 9, 3])
    for rows in (17, 23):
        x, dout = torch.randn(2, rows, titan.D)
        want = step(ours, x, counts, dout)
        for name, got in step(_named_like(ours, compiled), x, counts, dout).items():
            torch.testing.assert_close(got, want[name])


def _named_like(module, function):
    """A compiled module puts a prefix before the names of parameters."""
    function.named_parameters = module.named_parameters
    return function


@pytest.mark.tries("torchtitan", "its command line")
def test_the_command_of_the_readme():
    """Parsed as torchtitan does; every layer of the model gets our experts."""
    command = re.search(r"^torchrun .*?-m torchtitan\.train (.*\n(?: .*\n)*)", README, re.MULTILINE)
    assert command
    config = ConfigManager().parse_args(shlex.split(command[1].replace("\\\n", " ")))
    layers = len(config.model_spec.model.layers)
    assert len(apply_overrides(config.override, config)) == layers > 0
    with torch.device("meta"):
        model = config.model_spec.model.build()
    experts = [m for m in model.modules() if isinstance(m, GroupedExperts)]
    assert [type(m) for m in experts] == [adapter.FusedExperts] * layers


@pytest.mark.parametrize("override", titan.OVERRIDES)
def test_other_experts_are_left_alone(override):
    """GPT-OSS has a clamp and biases: another class, which this is no replacement for."""
    config = titan.layer_config()
    config.inner_experts = GptOssGroupedExperts.Config(dim=32, hidden_dim=16, num_experts=4)
    imports = titan.OverrideConfig(imports=[f"{adapter.__name__}.{override}"])
    assert apply_overrides(imports, config) == []
    assert type(config.inner_experts) is GptOssGroupedExperts.Config
