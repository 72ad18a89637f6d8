"""The modules: keys, shapes, losses, modes."""

import copy
import runpy

import pytest
import torch
from helpers import budget
from torch.nn import functional as F

from sonicmoe import ActivationType, Experts, KernelBackendMoE, MoE
from sonicmoe.reference import layer as reference
from sonicmoe.routing import plain_linear

ROUTERS = {
    "softmax_over_topk": (True, False),
    "topk_over_softmax": (False, False),
    "topk_over_softmax_normalized": (False, True),
}


def _moe(**options) -> MoE:
    return MoE(5, 2, 16, 8, **options)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [ActivationType.SWIGLU, ActivationType.RELU_SQ])
def test_state_dict_is_the_published_one(bias, activation):
    columns = 16 if activation.is_gated else 8
    want = {
        "router.weight": (5, 16),
        "c_fc.weight": (5, columns, 16),
        "c_proj.weight": (5, 16, 8),
    }
    if bias:
        want |= {"c_fc.bias": (5, columns), "c_proj.bias": (5, 16)}
    moe = _moe(activation_function=activation, add_bias=bias)
    assert {name: tuple(t.shape) for name, t in moe.state_dict().items()} == want


def test_positional_arguments_are_the_published_ones():
    moe = MoE(5, 2, 16, 8, ActivationType.GELU, True, 0.02)
    assert moe.c_fc.bias is not None and moe.activation_function is ActivationType.GELU
    assert moe.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_the_layer_is_the_reference(router, gate_up):
    moe = _moe(router=router, gate_up=gate_up, add_bias=True, z_loss_coef=0.1, aux_loss_coef=0.5)
    torch.nn.init.normal_(moe.c_fc.bias)
    torch.nn.init.normal_(moe.c_proj.bias)
    x = torch.randn(3, 7, 16, requires_grad=True)
    out, aux = moe(x)
    assert out.shape == x.shape and aux.dim() == 0 and aux.dtype == torch.float32

    twin = copy.deepcopy(moe).double()
    y = x.detach().double().requires_grad_()
    logits = y.reshape(-1, 16) @ twin.router.weight.mT
    scores, ids = reference.route(logits, 2, *ROUTERS[router])
    want = reference.experts(
        y.reshape(-1, 16), ids, scores, twin.c_fc.weight, twin.c_proj.weight, twin.c_fc.bias,
        twin.c_proj.bias, gate_up=gate_up,
    ).view_as(y)  # fmt: skip
    share = F.normalize(logits.softmax(-1).sum(0), p=1, dim=0)
    load = F.normalize(ids.flatten().bincount(minlength=5).double(), p=1, dim=0)
    want_aux = 0.5 * 5 * (share * load).sum() + 0.1 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(aux.double(), want_aux, rtol=1e-5, atol=1e-6)

    dout = torch.randn_like(out)
    (out * dout).sum().add(aux).backward()
    (want * dout).sum().add(want_aux).backward()
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(moe.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_backward_after_eval():
    moe, x = _moe().eval(), torch.randn(9, 16, requires_grad=True)
    out, aux = moe(x)
    (out.sum() + aux).backward()
    assert x.grad.abs().sum() > 0 and all(p.grad is not None for p in moe.parameters())


def test_inference_mode_keeps_nothing():
    moe, kept = _moe(add_bias=True), []
    x = torch.randn(9, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out, aux = moe(x, is_inference_mode=True)
    assert not kept and aux is None and not out.requires_grad
    torch.testing.assert_close(out, moe(x)[0])


def test_torch_inference_mode():
    moe, x = _moe(), torch.randn(9, 16)
    with torch.inference_mode():
        out, _ = moe(x)
    torch.testing.assert_close(out, moe(x)[0])


def test_backend_of_the_cpu():
    moe, x = _moe(), torch.randn(9, 16)
    out, _ = moe(x)
    for backend in (KernelBackendMoE.torch, "torch"):
        assert torch.equal(out, moe(x, kernel_backend_moe=backend)[0])
    with pytest.raises(ValueError, match="backend: expected tensors on a GPU"):
        moe(x, kernel_backend_moe="sonicmoe")


def test_fp32_router_logits_choose_where_bf16_ties():
    """Experts 0 and 1 differ by less than bf16 can hold: in bf16 they tie, the lower id wins."""
    moe = MoE(2, 1, 8, 8, fp32_router_logits=True).to(torch.bfloat16)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:, 0] = 1
        moe.router.weight[1, 1] = 2**-10
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    exact, _ = moe._router_logits(x)
    assert exact.dtype == torch.float32 and (exact[:, 1] > exact[:, 0]).all()
    out, aux = moe(x)
    (out.sum() + aux).backward()
    assert (moe.c_fc.weight.grad[0] == 0).all() and (moe.c_fc.weight.grad[1] != 0).any()


@pytest.mark.parametrize("needs", ["x and router", "router", "x"])
def test_fp32_router_logits_keep_no_copy_of_x(needs):
    """And err no more than plain PyTorch: the logits in fp32, their gradients in bf16."""
    moe = MoE(5, 2, 64, 8, fp32_router_logits=True).to(torch.bfloat16)
    weight = moe.router.weight.requires_grad_("router" in needs)
    x = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad="x" in needs)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        logits, same = moe._router_logits(x)
    assert not [t for t in kept if t.dtype == torch.float32 and t.numel() >= x.numel()]
    assert same.requires_grad == x.requires_grad and torch.equal(same, x)
    upstream = torch.randn_like(logits)
    found = torch.autograd.grad(logits, [t for t in (x, weight) if t.requires_grad], upstream)

    def plain(dtype):
        leaves = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in (x, weight)]
        result = F.linear(*leaves)
        needed = [t for t in leaves if t.requires_grad]
        return result.detach(), torch.autograd.grad(result, needed, upstream.to(dtype))

    exact, wide = plain(torch.float64)
    budget(logits.detach(), plain(torch.float32)[0], exact, name="logits")
    for got, narrow, true in zip(found, plain(torch.bfloat16)[1], wide, strict=True):
        budget(got, narrow, true)


def test_autocast():
    moe, x = _moe(add_bias=True), torch.randn(9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = moe(x)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in moe.parameters())
    torch.testing.assert_close(out.float(), moe(x)[0], rtol=0.1, atol=0.1)


def test_under_autocast_the_router_is_computed_as_its_module_is():
    moe, x = _moe(), torch.randn(9, 16, requires_grad=True)
    grads = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out, aux_loss = moe(x)
        loss = out.float().square().sum() + aux_loss
        grads.append(torch.autograd.grad(loss, [x, *moe.parameters()]))
        moe.router.register_forward_hook(lambda *_: None)  # then it is called
    assert all(map(torch.equal, *grads))


def test_built_without_memory():
    """On the meta device, as large models are."""
    with torch.device("meta"):
        moe = _moe(add_bias=True)
    assert all(p.is_meta for p in moe.parameters())
    moe = moe.to_empty(device="cpu")
    for experts in (moe.c_fc, moe.c_proj):
        experts.reset_parameters()
        assert experts.weight.isfinite().all() and (experts.bias == 0).all()


def test_experts_default_deviation():
    experts = Experts(8, 64, 64, add_bias=False)
    assert experts.bias is None
    assert experts.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert "8, in=64, out=64" in repr(experts) and "top_k=2" in repr(_moe())


def _routed(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The logits that `moe` decided on."""
    seen = []
    handle = moe.routing.register_forward_hook(lambda module, args, out: seen.append(out.logits))
    moe(x)
    handle.remove()
    return seen[0]


def test_a_router_with_a_bias_has_its_bias():
    moe, x = _moe(), torch.randn(6, 16)
    moe.router = torch.nn.Linear(16, 5)
    torch.nn.init.normal_(moe.router.bias)
    assert torch.equal(_routed(moe, x), moe.router(x))
    out, aux = moe(x.requires_grad_())
    (out.square().sum() + aux).backward()
    assert moe.router.bias.grad.abs().sum() > 0


def test_hooks_on_the_router_fire():
    moe, x = _moe(), torch.randn(6, 16, requires_grad=True)
    want = moe(x)[0]
    (dx,) = torch.autograd.grad(want.square().sum(), x)
    fired = []
    moe.router.register_forward_hook(lambda *_: fired.append("forward"))
    moe.router.register_full_backward_hook(lambda *_: fired.append("backward"))
    got = moe(x)[0]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), x)[0], dx)
    assert fired == ["forward", "backward"]


HOOKS = {
    "forward": "register_forward_hook",
    "forward pre": "register_forward_pre_hook",
    "backward": "register_full_backward_hook",
    "backward pre": "register_full_backward_pre_hook",
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("where", ["router", "global"])
def test_one_hook_alone_is_enough_to_call_the_router(where, kind):
    moe, x, fired = _moe(), torch.randn(6, 16, requires_grad=True), []
    if where == "router":
        register = getattr(moe.router, HOOKS[kind])
    else:
        register = getattr(
            torch.nn.modules.module, HOOKS[kind].replace("register", "register_module")
        )
    handle = register(lambda module, *_: fired.append(module))
    try:
        moe(x)[0].square().sum().backward()
    finally:
        handle.remove()
    assert fired.count(moe.router) == 1
    moe(x)[0].square().sum().backward()
    assert fired.count(moe.router) == 1


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", ["c_fc", "c_proj"])
def test_hooks_on_the_weights_warn(name, kind):
    with pytest.warns(UserWarning, match="a hook on Experts never runs"):
        getattr(getattr(_moe(), name), HOOKS[kind])(lambda *_: None)


@pytest.mark.parametrize("where", ["instance", "class"])
def test_a_replaced_forward_is_called(where, monkeypatch):
    moe, x = _moe(), torch.randn(6, 16)
    want = -moe.router(x)
    original = torch.nn.Linear.forward
    if where == "instance":
        moe.router.forward = lambda x: -original(moe.router, x)
    else:
        monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: -original(self, x))
    assert torch.equal(_routed(moe, x), want)


def test_a_forward_that_was_replaced_before_the_import_is_called(monkeypatch):
    original = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: -original(self, x))
    imported = runpy.run_path(plain_linear.__file__)
    assert not imported["is_plain_linear"](torch.nn.Linear(16, 5, bias=False))
    monkeypatch.undo()
    imported = runpy.run_path(plain_linear.__file__)
    assert imported["is_plain_linear"](torch.nn.Linear(16, 5, bias=False))


def test_fp32_logits_of_16_bit_weights_under_a_global_hook():
    """Tools such as `FlopCounterMode` register them; the layer computes the same as without."""
    moe, x = _moe(fp32_router_logits=True).bfloat16(), torch.randn(6, 16).bfloat16()
    want = _routed(moe, x)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        got = _routed(moe, x)
    finally:
        handle.remove()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)


def test_a_router_that_is_wrapped_is_called():
    """As PEFT wraps every linear layer for LoRA."""

    class Wrapped(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.more = base, torch.nn.Linear(16, 5, bias=False)

        @property
        def weight(self):
            return self.base.weight

        def forward(self, x):
            return self.base(x) + self.more(x)

    moe, x = _moe(), torch.randn(6, 16)
    moe.router = Wrapped(moe.router)
    assert torch.equal(_routed(moe, x), moe.router(x))
    moe(x)[0].square().sum().backward()
    assert moe.router.more.weight.grad.abs().sum() > 0


def test_fp32_logits_of_a_router_that_is_called():
    moe, x = _moe(fp32_router_logits=True).bfloat16(), torch.randn(6, 16).bfloat16()
    moe.router = torch.nn.Linear(16, 5)
    logits = _routed(moe, x)
    assert logits.dtype == torch.float32 and torch.equal(logits, moe.router(x.float()))
    moe.router.bfloat16()
    with pytest.raises(ValueError, match="fp32_router_logits: expected False, or"):
        moe(x)


def test_a_router_of_another_size_is_refused():
    moe = _moe()
    moe.router = torch.nn.Linear(16, 6, bias=False)
    with pytest.raises(ValueError, match=r"logits: expected \(T, E\) with E = 5"):
        moe(torch.randn(6, 16))
