"""Options of the modules: device and dtype, a router bias, a shared expert."""

import copy

import pytest
import torch
from helpers import same_bits
from research.memory import saved_bytes
from torch.nn import functional as F

from sonicmoe import ActivationType, Experts, MemoryPolicy, MoE
from sonicmoe.reference.activation import activate
from sonicmoe.routing import Sigmoid

SIZES = (5, 2, 16, 8)
EVERYTHING = {
    "add_bias": True,
    "router_bias": True,
    "shared_intermediate_size": 24,
    "shared_gate": True,
}


def _step(moe: MoE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    out, aux = moe(x)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.double).view_as(out)
    names, leaves = zip(*moe.named_parameters(), strict=True)
    gradients = torch.autograd.grad((out * weight).sum() + aux, (x, *leaves))
    by_name = dict(zip(("x", *names), gradients, strict=True))
    return {"out": out.detach(), "aux": aux.detach(), **by_name}


# --- device and dtype -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_that_of_every_parameter(dtype):
    moe = MoE(*SIZES, dtype=dtype, **EVERYTHING)
    assert {p.dtype for p in moe.parameters()} == {dtype}
    out, aux = moe(torch.randn(9, 16, dtype=dtype))
    assert out.dtype == dtype
    (out.sum() + aux).backward()
    experts = Experts(4, 16, 8, dtype=dtype, device="meta")
    assert (experts.weight.dtype, experts.bias.dtype) == (dtype, dtype) and experts.weight.is_meta


def test_device_and_dtype_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        MoE(*SIZES, ActivationType.RELU, False, None, "cpu")
    with pytest.raises(TypeError, match="positional"):
        Experts(4, 16, 8, True, None, "cpu")


def test_built_on_the_meta_device_as_built_on_the_cpu():
    """Every parameter and buffer, `load` of the router too, which is in no state dict."""
    options = {"router": "sigmoid", "dtype": torch.bfloat16, "std": 0.02, **EVERYTHING}
    moe = MoE(*SIZES, device="meta", **options)
    assert all(t.is_meta for t in (*moe.parameters(), *moe.buffers()))
    moe.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*moe.parameters(), *moe.buffers()):
            t.fill_(torch.nan)
    moe.reset_parameters()
    other = MoE(*SIZES, **options)
    for name, t in (*moe.named_parameters(), *moe.named_buffers()):
        want = other.get_parameter(name) if "routing" not in name else other.get_buffer(name)
        assert (t.shape, t.dtype) == (want.shape, want.dtype), name
        assert t.isfinite().all() and (t != 0).any() == (want != 0).any(), name
    assert moe.c_fc.weight.float().std().item() == pytest.approx(0.02, rel=0.2)
    moe(torch.randn(9, 16, dtype=torch.bfloat16))


def test_a_router_object_follows_the_layer():
    router = Sigmoid(5, 2)
    moe = MoE(*SIZES, router=router, device="meta", dtype=torch.bfloat16)
    assert moe.routing is router and router.selection_bias.is_meta and router.load.is_meta
    assert router.selection_bias.dtype == torch.float32  # as in `moe.bfloat16()`


# --- router bias ----------------------------------------------------------------------------------
def test_router_bias():
    moe, x = MoE(*SIZES, router_bias=True).double(), torch.randn(7, 16, dtype=torch.double)
    assert moe.state_dict()["router.bias"].shape == (5,)
    torch.nn.init.normal_(moe.router.bias)
    got = _step(moe, x)
    twin = MoE(5, 2, 24, 8).double()  # the bias as the weight of an input that is always one
    with torch.no_grad():
        for ours, theirs in ((moe.c_fc, twin.c_fc), (moe.router, twin.router)):
            theirs.weight.copy_(F.pad(ours.weight, (0, 8)))
        twin.c_proj.weight.copy_(F.pad(moe.c_proj.weight, (0, 0, 0, 8)))
        twin.router.weight[:, 16] = moe.router.bias
    one = F.pad(F.pad(x, (0, 1), value=1.0), (0, 7)).requires_grad_()
    out, aux = twin(one)
    weight = torch.linspace(-1, 1, x.numel(), dtype=torch.double).view_as(x)
    ((out[:, :16] * weight).sum() + aux).backward()
    torch.testing.assert_close(got["out"], out[:, :16])
    torch.testing.assert_close(got["x"], one.grad[:, :16])
    torch.testing.assert_close(got["router.bias"], twin.router.weight.grad[:, 16])
    torch.testing.assert_close(got["router.weight"], twin.router.weight.grad[:, :16])


# --- shared expert --------------------------------------------------------------------------------
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
@pytest.mark.parametrize("name", ["SWIGLU", "SWIGLU_CLAMPED", "RELU_SQ"])
def test_shared_expert(name, gate_up, gate):
    """The routed experts alone, plus a dense MLP written out."""
    activation = ActivationType[name]
    options = {"activation_function": activation, "gate_up": gate_up}
    moe = MoE(*SIZES, shared_intermediate_size=24, shared_gate=gate, **options).double()
    columns = 48 if activation.is_gated else 24
    routed = MoE(*SIZES, **options).double()
    missing = routed.load_state_dict(moe.state_dict(), strict=False).unexpected_keys
    shapes = {name: tuple(moe.state_dict()[name].shape) for name in missing}
    assert shapes == {
        "shared_expert.c_fc.weight": (columns, 16),
        "shared_expert.c_proj.weight": (16, 24),
        **({"shared_expert.gate.weight": (1, 16)} if gate else {}),
    }

    x = torch.randn(3, 4, 16, dtype=torch.double)
    got = _step(moe, x)
    y = x.clone().requires_grad_()
    out, aux = routed(y)
    shared = copy.deepcopy(moe.shared_expert)
    z = y @ shared.c_fc.weight.mT
    dense = activate(z, activation, gate_up) @ shared.c_proj.weight.mT
    if gate:
        dense = dense * torch.sigmoid(y @ shared.gate.weight.mT)
    out = out + dense
    weight = torch.linspace(-1, 1, x.numel(), dtype=torch.double).view_as(x)
    ((out * weight).sum() + aux).backward()
    want = {"out": out.detach(), "aux": aux.detach(), "x": y.grad}
    want |= {name: p.grad for name, p in routed.named_parameters()}
    want |= {f"shared_expert.{name}": p.grad for name, p in shared.named_parameters()}
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda m, n=name: f"{n}: {m}")
    inference, none = moe(x, is_inference_mode=True)
    assert none is None and not inference.requires_grad
    torch.testing.assert_close(inference, got["out"])


def test_std_is_that_of_the_shared_expert_too():
    moe = MoE(*SIZES, std=0.003, shared_intermediate_size=64, shared_gate=True)
    for name, p in moe.shared_expert.named_parameters():
        assert p.std().item() == pytest.approx(0.003, rel=0.5), name
    default = MoE(*SIZES, shared_intermediate_size=64).shared_expert
    assert default.c_fc.weight.std().item() == pytest.approx(1 / 4, rel=0.2)
    assert default.c_proj.weight.std().item() == pytest.approx(1 / 8, rel=0.2)


def test_shared_expert_does_not_change_the_seed_of_the_others():
    torch.manual_seed(0)
    plain = MoE(*SIZES)
    torch.manual_seed(0)
    state = MoE(*SIZES, shared_intermediate_size=8).state_dict()
    same_bits(plain.state_dict(), {n: t for n, t in state.items() if "shared" not in n})


def test_autocast_with_every_option():
    moe, x = MoE(*SIZES, **EVERYTHING), torch.randn(9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out, aux = moe(x)
    (out.float().sum() + aux).backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in moe.parameters())
    torch.testing.assert_close(out.float(), moe(x)[0], rtol=0.1, atol=0.1)


def test_compiled_with_every_option():
    torch._dynamo.reset()
    moe, x = MoE(*SIZES, **EVERYTHING).double(), torch.randn(7, 16, dtype=torch.double)
    compiled = copy.deepcopy(moe)
    compiled.compile(fullgraph=True, backend="aot_eager")
    got, want = _step(compiled, x), _step(moe, x)
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda m, n=name: f"{n}: {m}")


def test_a_gate_without_a_shared_expert_is_refused():
    with pytest.raises(ValueError, match="shared_gate: expected False without a shared expert"):
        MoE(*SIZES, shared_gate=True)


@pytest.mark.parametrize("size", [12, -8, 8.0])
def test_a_size_that_does_not_fit_is_refused(size):
    with pytest.raises(ValueError, match="shared_intermediate_size: expected a multiple of 8"):
        MoE(*SIZES, shared_intermediate_size=size)


# --- options of a built layer ---------------------------------------------------------------------
def test_memory_can_be_set():
    moe = MoE(*SIZES)
    moe.memory = "recompute"
    assert moe.memory == MemoryPolicy("recompute")
    x = torch.randn(9, 16)
    held, _ = saved_bytes(lambda: moe(x)[0], [*moe.parameters()])
    moe.memory = MemoryPolicy()
    kept, _ = saved_bytes(lambda: moe(x)[0], [*moe.parameters()])
    assert kept - held == 4 * 9 * 2 * 16  # Z
    with pytest.raises(ValueError, match="memory: expected one of 'keep'"):
        moe.memory = "recalculate"
    assert moe.memory == MemoryPolicy()


def test_precision_and_its_cache_can_be_set():
    moe = MoE(4, 2, 32, 16, dtype=torch.bfloat16)
    same = MoE(4, 2, 32, 16, dtype=torch.bfloat16, precision="fp8", cache_fp8_weights=True)
    same.load_state_dict(moe.state_dict())
    x = torch.randn(9, 32).bfloat16()
    with pytest.raises(ValueError, match="cache_fp8_weights: expected False without precision"):
        moe.cache_fp8_weights = True
    moe.precision = "fp8"
    moe.cache_fp8_weights = True
    assert moe.cache_fp8_weights and torch.equal(moe(x)[0], same(x)[0])
    moe.precision, same.cache_fp8_weights = None, False
    assert not same.cache_fp8_weights and not torch.equal(moe(x)[0], same(x)[0])
    refuses = MoE(4, 2, 32, 8)
    with pytest.raises(ValueError, match="intermediate_size: expected a multiple of 16"):
        refuses.precision = "fp8"
    assert refuses.precision is None
    with pytest.raises(ValueError, match="precision: expected 'fp8'"):
        moe.precision = "int4"


@pytest.mark.parametrize(
    ("name", "value"),
    [("gate_up", "concatenated"), ("activation_function", ActivationType.GEGLU)],
)
def test_gate_up_and_activation_reach_the_shared_expert(name, value):
    moe = MoE(*SIZES, shared_intermediate_size=24)
    other = MoE(*SIZES, shared_intermediate_size=24, **{name: value})
    other.load_state_dict(dict(moe.state_dict()))  # without the note of its order
    setattr(moe, name, value)
    x = torch.randn(9, 16)
    assert torch.equal(moe(x)[0], other(x)[0])
    with pytest.raises(ValueError, match=f"{name}: expected"):
        setattr(moe, name, "both")


def test_an_activation_by_its_name():
    """To build the layer, and later to set it, also in the shared expert."""
    moe = MoE(*SIZES, activation_function="geglu", shared_intermediate_size=24)
    assert moe.activation_function is moe.shared_expert.activation is ActivationType.GEGLU
    moe.activation_function = "swiglu"
    assert moe.activation_function is moe.shared_expert.activation is ActivationType.SWIGLU


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 3), ("num_experts", 6), ("hidden_size", 32), ("intermediate_size", 16),
     ("router_kind", "sigmoid"), ("activation_function", ActivationType.RELU)],
)  # fmt: skip
def test_what_decided_the_weights_cannot_be_set(name, value):
    moe = MoE(*SIZES)
    before = getattr(moe, name)
    with pytest.raises(ValueError, match=f"{name}: expected .*, as the layer was built"):
        setattr(moe, name, value)
    setattr(moe, name, before)
    assert getattr(moe, name) == before


def test_repr_shows_what_decides():
    """Options that were set later too; an ungated layer has no order of gate and up."""
    moe = MoE(8, 2, 32, 16, add_bias=True, precision="fp8", gate_up="concatenated")
    moe.memory = MemoryPolicy("recompute", 4)
    shown = repr(moe)
    for words in (
        "router=softmax_over_topk", "activation=swiglu", "gate_up=concatenated",
        "precision=fp8", "memory=recompute in 4 slices",
        "(c_fc): Experts(8, in=32, out=32, bias=True)",
    ):  # fmt: skip
        assert words in shown
    plain = repr(MoE(8, 2, 32, 16, ActivationType.RELU_SQ))
    assert "precision=None, memory=keep" in plain and "gate_up" not in plain
