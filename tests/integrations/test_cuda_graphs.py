"""`sonicmoe.graphed` but for the capture: which graph serves a call, gradients, errors."""

import copy

import pytest
import static_memory
import torch
from torch import nn

import sonicmoe
from sonicmoe import MoE
from sonicmoe.integrations.cuda_graphs import Graphed


def layer(**options) -> MoE:
    torch.manual_seed(0)
    return MoE(4, 2, 16, 8, z_loss_coef=0.1, **options)


def tokens(number: int = 6, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 16, generator=generator).requires_grad_()


def graphed(module: nn.Module, *samples, **options) -> Graphed:
    return Graphed(module, samples, static_memory.pool(), **options)


def backward(module: nn.Module, x: torch.Tensor) -> None:
    out, loss = module(x)
    (out.square().sum() + loss).backward()


def same_gradients(got: nn.Module, want: nn.Module) -> None:
    for (name, p), q in zip(got.named_parameters(), want.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad), name


# --- gradients ------------------------------------------------------------------------------------
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_as_in_eager_calls(set_to_none):
    moe = layer()
    eager = copy.deepcopy(moe)
    graphs = graphed(moe, tokens())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (moe, eager)]
    for step in range(3):
        for micro in range(3):
            x, y = tokens(seed=3 * step + micro), tokens(seed=3 * step + micro)
            backward(graphs, x)
            backward(eager, y)
            assert torch.equal(x.grad, y.grad)
            same_gradients(moe, eager)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert graphs.replays == 9 and graphs.other_calls == 0


def test_platform_alone_is_wrong_with_accumulation():
    """What `Graphed` is for; and that the stand-in for it shows this."""
    module, eager = nn.Linear(16, 3), nn.Linear(16, 3)
    eager.load_state_dict(module.state_dict())
    replay = static_memory.pool()(_Plain(module), (tokens(),))
    for seed in (1, 2):
        replay(tokens(seed=seed))[0].square().sum().backward()
        eager(tokens(seed=seed)).square().sum().backward()
    assert not torch.allclose(module.weight.grad, eager.weight.grad)


class _Plain(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return (self.module(x),)


def test_a_gradient_alone_is_not_copied():
    moe = layer()
    graphs, addresses = graphed(moe, tokens()), []
    for seed in (1, 2):
        moe.zero_grad(set_to_none=True)
        backward(graphs, tokens(seed=seed))
        addresses.append([p.grad.data_ptr() for p in moe.parameters()])
    assert addresses[0] == addresses[1] and set(addresses[0]) <= graphs._addresses


def test_gradients_of_two_sizes_accumulate():
    moe = layer()
    eager = copy.deepcopy(moe)
    graphs = graphed(moe, tokens(3), tokens(6))
    for seed, number in enumerate((6, 3, 3, 6, 5, 6)):
        backward(graphs, tokens(number, seed))
        backward(eager, tokens(number, seed))
    same_gradients(moe, eager)
    assert graphs.replays == 5 and graphs.other_calls == 1


def test_gradients_of_an_input_accumulate():
    moe = layer()
    eager, graphs = copy.deepcopy(moe), graphed(moe, tokens())
    x, y = tokens(seed=1), tokens(seed=1)
    for _ in range(2):
        backward(graphs, x)
        backward(eager, y)
    assert torch.equal(x.grad, y.grad)


def test_main_grad():
    moe, eager = layer(), layer()
    for m in (moe, eager):
        for w in (m.c_fc.weight, m.c_proj.weight):
            w.main_grad = torch.zeros_like(w)
            w.grad_added_to_main_grad = False
    graphs = graphed(moe, tokens())
    assert not moe.c_fc.weight.main_grad.any()  # nothing is left of the capture
    moe.c_fc.weight.grad_added_to_main_grad = False
    for seed in (1, 2):
        backward(graphs, tokens(seed=seed))
        backward(eager, tokens(seed=seed))
    assert moe.c_fc.weight.grad_added_to_main_grad
    assert torch.equal(moe.c_fc.weight.main_grad, eager.c_fc.weight.main_grad)
    assert torch.equal(moe.router.weight.grad, eager.router.weight.grad)
    moe.c_fc.weight.main_grad = torch.zeros_like(moe.c_fc.weight)
    with pytest.raises(ValueError, match=r"^c_fc\.weight: expected the main_grad it had"):
        graphs(tokens())


# --- outputs --------------------------------------------------------------------------------------
def test_outputs_outlive_the_next_call():
    graphs = graphed(layer(), tokens())
    out, loss = graphs(tokens(seed=1))
    before = out.detach().clone(), loss.detach().clone()
    graphs(tokens(seed=2))
    assert torch.equal(out, before[0]) and torch.equal(loss, before[1])


def test_autograd_notices_an_output_without_a_copy():
    graphs = graphed(layer(), tokens(), copy_outputs=False)
    out, _ = graphs(tokens(seed=1))
    squares = out.square().sum()  # saves the output
    with torch.no_grad():
        graphs(tokens(seed=2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


class _Named(nn.Module):
    """Keyword arguments, and results as models return them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x, mask=None, scale=1, detached=False):
        out = self.linear(x) * scale
        if mask is not None:
            out = out * mask
        return {"out": out, "again": (out.detach() if detached else out, None), "scale": scale}


def test_keyword_arguments_and_nested_results():
    module = _Named()
    sample = {"x": tokens(), "scale": 2, "detached": True}
    graphs = graphed(module, sample)
    x = tokens(seed=3)
    got, want = graphs(scale=2, detached=True, x=x), module(x, scale=2, detached=True)
    assert got.keys() == want.keys() and got["scale"] == 2 and got["again"][1] is None
    assert torch.equal(got["out"], want["out"]) and torch.equal(got["again"][0], want["again"][0])
    assert got["out"].requires_grad and not got["again"][0].requires_grad
    assert graphs.replays == 1
    graphs(x=x, scale=3, detached=True)
    graphs(x=x, scale=2, detached=True, mask=torch.ones(6, 4))
    assert graphs.replays == 1 and graphs.other_calls == 2


def test_the_sample_is_not_written_to():
    x = tokens()
    before = x.detach().clone()
    graphs = graphed(layer(), x)
    graphs(tokens(seed=5))
    assert torch.equal(x, before)


# --- which graph serves a call --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "graph"),
    [
        (lambda: tokens(seed=1), True),
        (lambda: tokens(seed=1).detach(), True),  # needs fewer gradients than were captured
        (lambda: tokens(1), False),  # would be broadcast
        (lambda: tokens(12), False),
        (lambda: tokens().detach().double(), False),
    ],
)
def test_calls_that_a_graph_serves(make, graph):
    moe = layer()
    x = make()
    module, want = graphed(moe, tokens()), None
    if x.dtype == torch.float32:
        want = moe(x)[0]
        assert torch.equal(module(x)[0], want)
    else:
        with pytest.raises(ValueError, match="float64"):
            module(x)
    assert (module.replays, module.other_calls) == (1 if graph else 0, 0 if graph else 1)
    with pytest.raises(ValueError, match=r"^inputs: expected one of the captured: argument 0 \(6"):
        graphed(moe, tokens(), other="error")(tokens(7))


def test_an_input_that_newly_needs_a_gradient():
    moe = layer()
    graphs = graphed(moe, tokens().detach())
    x = tokens(seed=1)
    backward(graphs, x)
    assert graphs.other_calls == 1 and x.grad is not None
    with torch.no_grad():
        graphs(x)
    assert graphs.replays == 1


def test_a_capture_without_gradients_serves_no_training():
    moe = layer()
    with torch.no_grad():
        graphs = graphed(moe, tokens())
        graphs(tokens(seed=1))
    backward(graphs, tokens(seed=1))
    assert (graphs.replays, graphs.other_calls) == (1, 1)


def test_other_modes_run_eagerly_or_raise():
    moe = layer()
    graphs = graphed(moe, tokens())
    moe.routing.eval()
    graphs(tokens())
    moe.train()
    with torch.autocast("cpu"):
        graphs(tokens())
    assert (graphs.replays, graphs.other_calls) == (0, 2)
    strict = graphed(moe, tokens(), other="error")
    moe.eval()
    with pytest.raises(ValueError, match="expected the train or eval mode"):
        strict(tokens())
    moe.train()
    strict(tokens())


# --- errors ---------------------------------------------------------------------------------------
def test_a_call_before_the_backward_pass_of_the_last():
    graphs = graphed(layer(), tokens(), tokens(3))
    first = graphs(tokens(seed=1))[0].sum()
    graphs(tokens(3, seed=2))
    with pytest.raises(ValueError, match=r"^backward pass: .* got another call of the graphs"):
        first.backward()


def test_a_second_backward_pass():
    graphs = graphed(layer(), tokens())
    out = graphs(tokens(seed=1))[0].sum()
    out.backward(retain_graph=True)
    with pytest.raises(ValueError, match=r"^backward pass: .* got a second one"):
        out.backward()


def test_a_forward_pass_without_a_backward_pass_is_no_error():
    moe = layer()
    eager, graphs = copy.deepcopy(moe), graphed(moe, tokens())
    graphs(tokens(seed=1))
    backward(graphs, tokens(seed=2))
    backward(eager, tokens(seed=2))
    same_gradients(moe, eager)


def test_weights_that_change_before_the_backward_pass():
    moe = layer()
    graphs = graphed(moe, tokens())
    out = graphs(tokens(seed=1))[0].sum()
    with torch.no_grad():
        moe.c_proj.weight.mul_(2)
    with pytest.raises(ValueError, match=r"^parameters: expected the values of the forward pass"):
        out.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.double(), r"^router\.weight: expected the tensor that was captured"),
        (
            lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
            r"^router\.weight: expected the tensor that was captured",
        ),
        (
            lambda m: setattr(m.c_fc, "weight", nn.Parameter(m.c_fc.weight.detach().clone())),
            r"^c_fc\.weight: expected the tensor that was captured",
        ),
        (lambda m: m.router.register_parameter("extra", None), r"^module: .* others in router"),
        (lambda m: setattr(m, "c_fc", copy.deepcopy(m.c_fc)), r"^module: expected the submodules"),
        (lambda m: m.c_fc.weight.requires_grad_(), r"^c_fc\.weight: expected requires_grad=False"),
    ],
)
def test_a_module_that_is_another_one_since(change, message):
    moe = layer()
    moe.c_fc.weight.requires_grad_(False)
    graphs = graphed(moe, tokens())
    graphs(tokens())
    change(moe)
    with pytest.raises(ValueError, match=message):
        graphs(tokens())


def test_buffers_keep_their_values_in_a_capture():
    norm = nn.BatchNorm1d(16)
    graphs, eager = graphed(norm, tokens()), nn.BatchNorm1d(16)
    assert torch.equal(norm.running_mean, torch.zeros(16))
    assert torch.equal(graphs(tokens(seed=1)), eager(tokens(seed=1)))
    assert torch.equal(norm.running_mean, eager.running_mean)


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        ((), {}, "^samples: expected one or more"),
        (([1],), {}, "^samples: expected a tensor, a tuple of arguments or a dict"),
        (((None,),), {}, "^samples: expected a tensor in each"),
        (((tokens(), [1]),), {}, "^argument 1: expected a tensor, None, a number"),
        ((tokens(), tokens(seed=2)), {}, "^samples: expected samples that differ"),
        ((tokens(),), {"other": "compiled"}, "^other: expected one of"),
    ],
)
def test_bad_arguments(samples, options, message):
    with pytest.raises(ValueError, match=message):
        graphed(layer(), *samples, **options)


def test_bad_arguments_before_a_capture():
    with pytest.raises(ValueError, match=r"^router\.weight: expected a parameter whole and on a"):
        sonicmoe.graphed(layer(), tokens())
    with pytest.raises(ValueError, match=r"^argument 0: expected a tensor on a GPU"):
        sonicmoe.graphed(nn.Identity(), tokens())
    with pytest.raises(ValueError, match=r"^module: expected a torch\.nn\.Module, got function"):
        sonicmoe.graphed(lambda x: x, tokens())


class _Cache(nn.Module):
    def forward(self, x):
        return x * 1, object()


def test_results_that_no_graph_returns():
    with pytest.raises(ValueError, match=r"^module: expected one that returns tensors.*use_cache"):
        graphed(_Cache(), tokens())


# --- kept FP8 weights -----------------------------------------------------------------------------
def fp8_layer(**options) -> MoE:
    torch.manual_seed(0)
    return MoE(4, 2, 64, 32, precision="fp8", dtype=torch.bfloat16, **options)


def fp8_tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(40, 64, generator=generator).bfloat16().requires_grad_()


def test_kept_weights_follow_steps_and_writes():
    moe, eager = fp8_layer(cache_fp8_weights=True), fp8_layer()
    graphs = graphed(moe, fp8_tokens(0))
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (moe, eager)]
    for seed in range(3):
        for _ in range(2):
            backward(graphs, fp8_tokens(seed))
            backward(eager, fp8_tokens(seed))
        same_gradients(moe, eager)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for m in (moe, eager):
                m.c_proj.weight.mul_(1.5)
    assert graphs.replays == 6


def test_a_write_is_quantized_before_the_replay():
    """By `Graphed`: a replay runs none of the layer's Python."""

    def capture(flat, static):
        outputs = flat(*static)
        return lambda *tensors: outputs

    moe = fp8_layer(cache_fp8_weights=True)
    with torch.no_grad():
        graphs = Graphed(moe, [fp8_tokens(0)], capture)
        moe.c_fc.weight.mul_(1.5)
        assert not moe._fp8_weights._kept.first.is_of(moe.c_fc.weight)
        graphs(fp8_tokens(1))
    assert moe._fp8_weights._kept.first.is_of(moe.c_fc.weight)


def test_kept_weights_that_are_gone():
    moe = fp8_layer(cache_fp8_weights=True)
    graphs = graphed(moe, fp8_tokens(0))
    moe._fp8_weights.clear()
    with pytest.raises(ValueError, match=r"^FP8 weights: expected the kept memory .* got none"):
        graphs(fp8_tokens(1))
    kept = moe._fp8_weights.address()
    moe(fp8_tokens(1))
    assert kept == () and moe._fp8_weights.address() != ()
    with pytest.raises(ValueError, match=r"^FP8 weights: .* got other memory"):
        graphs(fp8_tokens(1))
