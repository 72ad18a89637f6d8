"""Kept FP8 weights: every change that PyTorch can show is seen, others are an error."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from kept_weights import fresh, layer, tokens
from torch import nn

from sonicmoe import Fp8Weights, experts, grouped_experts
from sonicmoe.layer import fp8_weights
from sonicmoe.reference import quantize as reference


def test_quantized_once_while_nothing_changes(quantized):
    moe = layer()
    for _ in range(3):
        moe(tokens())[0].sum().backward()
    assert len(quantized) == 2
    with torch.no_grad():
        moe(tokens())
    assert len(quantized) == 2


def test_each_call_compares_another_sample(monkeypatch):
    samples, check = [], reference.checked_scales

    def record(*args):
        samples.append(args[6].clone())
        return check(*args)

    monkeypatch.setattr(reference, "checked_scales", record)
    moe = layer()
    for _ in range(4):
        moe(tokens())
    assert torch.equal(torch.stack(samples), torch.arange(3)[:, None, None].expand(3, 2, 4))


def buffers(moe: Any) -> list[torch.Tensor]:
    kept = moe._fp8_weights._kept
    return [t for part in (kept.first, kept.second) for t in part.quantized if t is not None]


def test_weights_are_quantized_in_place():
    moe = layer()
    optimizer = torch.optim.SGD(moe.parameters(), 1.0)
    moe(tokens())[0].sum().backward()
    before = buffers(moe)
    old = [t.clone() for t in before]
    optimizer.step()
    moe.refresh_fp8_weights()
    with torch.no_grad():
        moe.c_proj.weight.mul_(2)
    moe(tokens())
    after = buffers(moe)
    assert len(before) == 7 and all(a is b for a, b in zip(after, before, strict=True))
    for was, now in zip(old, after, strict=True):
        assert not torch.equal(was.float(), now.float())


@pytest.mark.parametrize("name", ["c_fc", "c_proj"])
def test_renew_quantizes_what_changed(name, quantized):
    """A replay of a CUDA graph starts with it."""
    moe = layer()
    moe(tokens())
    changed = getattr(moe, name).weight
    with torch.no_grad():
        changed.mul_(2)
    quantized.clear()
    moe._fp8_weights.renew()
    assert [w.data_ptr() for w in quantized] == [changed.data_ptr()]
    assert torch.equal(moe(tokens())[0], fresh(moe))


def test_without_a_cache_quantized_in_every_call(quantized):
    moe = layer(cache_fp8_weights=False)
    for _ in range(3):
        moe(tokens())
    assert len(quantized) == 6
    moe.refresh_fp8_weights()


class WritesData(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.mul_(1.5)


OPTIMIZERS = {
    "foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "for loop": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),  # leaves the version counter alone
    "data": WritesData,
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_of_optimizers_are_seen(kind, compiled, quantized):
    moe = layer()
    optimizer = OPTIMIZERS[kind](moe.parameters())
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    for _ in range(2):
        before = moe(tokens())[0]
        before.sum().backward()
        quantized.clear()
        step()
        assert len(quantized) == 2  # at once
        after = moe(tokens())[0]
        assert len(quantized) == 2
        assert not torch.equal(before, after) and torch.equal(after, fresh(moe))
    torch._dynamo.reset()


def test_an_optimizer_of_other_parameters_quantizes_nothing(quantized):
    moe, other = layer(), nn.Linear(4, 4)
    moe(tokens())[0].sum().backward()
    quantized.clear()
    for parameters in (other.parameters(), moe.router.parameters()):
        torch.optim.AdamW(parameters, 0.1).step()
    assert not quantized
    torch.optim.AdamW([moe.c_proj.weight], 0.1, fused=True).step()
    assert [w.data_ptr() for w in quantized] == [moe.c_proj.weight.data_ptr()]
    assert torch.equal(moe(tokens())[0], fresh(moe))


def test_an_optimizer_in_the_backward_pass():
    """W2 is quantized again before the backward pass reads W1."""
    found = []
    for cached in (True, False):
        moe = layer(cache_fp8_weights=cached)
        for p in moe.parameters():
            optimizer = torch.optim.SGD([p], 0.1)
            p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for _ in range(3):
            out = moe(tokens())[0]
            out.sum().backward()
        found.append(out)
    assert torch.equal(*found)


def test_a_dropped_layer_is_forgotten():
    moe = layer()
    moe(tokens())
    store = weakref.ref(moe._fp8_weights)
    assert store() in fp8_weights._stores
    del moe
    gc.collect()
    assert store() is None


def _inference(w):
    with torch.inference_mode():
        w.mul_(2)


def _replaced(moe):
    moe.c_fc.weight = nn.Parameter(2 * moe.c_fc.weight.detach())


def _loaded(moe, **options):
    state = {name: 2 * t for name, t in moe.state_dict().items()}
    moe.load_state_dict(state, **options)


def _through_fp32(moe):
    """Back in bf16 with other values, and with luck at the same address."""
    with torch.no_grad():
        moe.c_fc.float()
        moe.c_fc.weight.data.mul_(2)
        moe.c_fc.bfloat16()


def _swapped(moe):
    w = nn.Parameter(2 * moe.c_fc.weight.detach())
    torch.utils.swap_tensors(moe.c_fc.weight, w)


def _loaded_by_swapping(moe):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        _loaded(moe)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES = {
    "in place": lambda moe: moe.c_fc.weight.detach().mul_(2),
    "foreach": lambda moe: torch._foreach_mul_([moe.c_fc.weight.detach()], 2),
    "inference": lambda moe: _inference(moe.c_proj.weight),
    "init": lambda moe: nn.init.normal_(moe.c_fc.weight),
    "reset": lambda moe: moe.reset_parameters(),
    "load": _loaded,
    "load, assigned": lambda moe: _loaded(moe, assign=True),
    "load, swapped": _loaded_by_swapping,
    "load of a part": lambda moe: moe.c_fc.load_state_dict(
        {"weight": 2 * moe.c_fc.weight.detach()}
    ),
    "replaced": _replaced,
    "swapped": _swapped,
    "data assigned": lambda moe: setattr(moe.c_fc.weight, "data", 2 * moe.c_fc.weight.data),
    "set_": lambda moe: moe.c_fc.weight.set_(2 * moe.c_fc.weight.detach()),
    "another dtype": _through_fp32,
    "to_empty": lambda moe: (moe.to_empty(device="cpu"), moe.reset_parameters()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change):
    moe = layer()
    before = moe(tokens())[0].detach()  # `swap_tensors` refuses what a graph saved
    with torch.no_grad():
        CHANGES[change](moe)
    after = moe(tokens())[0]
    assert not torch.equal(before, after) and torch.equal(after, fresh(moe))


UNSEEN = {
    "data": lambda w: w.data.mul_(2),
    "storage": lambda w: w.untyped_storage().copy_((2 * w.detach()).untyped_storage()),
    "numpy": lambda w: w.detach().view(torch.int16).numpy().__iadd__(1 << 7),
}


@pytest.mark.parametrize("name", ["c_fc", "c_proj"])
@pytest.mark.parametrize("change", UNSEEN)
def test_other_changes_are_an_error_without_a_refresh(change, name):
    moe = layer()
    before = moe(tokens())[0]
    UNSEEN[change](getattr(moe, name).weight)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{name}\.weight: expected the values it had"):
            moe(tokens())
    with pytest.raises(ValueError, match=rf"^{name}\.weight: expected the values it had"):
        torch.optim.SGD(moe.parameters(), 0.1).step()
    moe.refresh_fp8_weights()
    after = moe(tokens())[0]
    assert not torch.equal(before, after) and torch.equal(after, fresh(moe))


def test_weights_that_are_not_finite_are_no_error():
    moe = layer()
    with torch.no_grad():
        moe.c_fc.weight[1, 2, 3] = torch.nan
        moe.c_proj.weight[2, 0, 1] = torch.inf
    for _ in range(2):
        assert moe(tokens())[0].isnan().any()


def test_an_expert_that_was_not_finite_and_is_repaired_unseen():
    moe = layer()
    with torch.no_grad():
        moe.c_fc.weight[1, 2, 3] = torch.nan
    moe(tokens())
    moe.c_fc.weight.data[1, 2, 3] = 0.01
    with pytest.raises(ValueError, match=r"^c_fc\.weight: expected the values it had"):
        moe(tokens())
    moe.refresh_fp8_weights()
    assert not moe(tokens())[0].isnan().any()


def test_weights_in_the_other_order_of_memory():
    """The dense strides of `transformers`: (E, K, N)."""
    moe = layer()
    for part in (moe.c_fc, moe.c_proj):
        part.weight = nn.Parameter(part.weight.detach().mT.contiguous().mT)
    for _ in range(2):
        assert torch.equal(moe(tokens())[0], fresh(moe))
    moe.c_proj.weight.data[3, 5, 7] += 1
    with pytest.raises(ValueError, match="c_proj"):
        moe(tokens())


def test_functional_call_uses_what_it_is_given(quantized):
    moe = layer()
    moe(tokens())
    doubled = {"c_fc.weight": 2 * moe.c_fc.weight.detach()}
    found = torch.func.functional_call(moe, doubled, (tokens(),))[0]
    expected = copy.deepcopy(moe)
    expected.load_state_dict(moe.state_dict() | doubled)
    assert torch.equal(found, expected(tokens())[0])
    assert torch.equal(moe(tokens())[0], fresh(moe))


def test_weights_that_are_computed_are_never_cached(quantized):
    moe = layer()

    class Doubled(nn.Module):
        def forward(self, w):
            return 2 * w

    torch.nn.utils.parametrize.register_parametrization(moe.c_fc, "weight", Doubled())
    for grad in (True, False, True):
        del quantized[:]
        with torch.set_grad_enabled(grad):
            moe(tokens())
        assert len(quantized) == 2


def test_what_inference_cached_can_be_trained():
    moe = layer()
    with torch.inference_mode():
        want = moe(tokens())[0]
    out = moe(tokens())[0]
    out.sum().backward()
    assert torch.equal(out, want) and moe.c_fc.weight.grad is not None
    with torch.inference_mode():
        other = layer()  # inference tensors have no version counter
        assert torch.equal(other(tokens())[0], want)


@pytest.mark.parametrize("memory", ["keep", "e4m3", "recompute"])
@pytest.mark.parametrize("name", ["c_fc", "c_proj"])
def test_weights_refreshed_before_the_backward_pass_are_an_error(name, memory):
    moe, x = layer(memory=memory), tokens().requires_grad_()
    out = moe(x)[0]
    out_again = moe(x)[0]
    torch.autograd.grad(out.sum(), x)
    getattr(moe, name).weight.data.mul_(2)  # which autograd does not see
    moe.refresh_fp8_weights()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out_again.sum(), x)


def test_other_weights_leave_those_of_a_running_step_alone():
    moe, x = layer(), tokens().requires_grad_()
    want = torch.autograd.grad(moe(x)[0].sum(), x)[0]
    out = moe(x)[0]
    doubled = {"c_fc.weight": 2 * moe.c_fc.weight.detach()}
    torch.func.functional_call(moe, doubled, (x,))
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], want)


def test_copies_and_pickles_are_empty():
    moe = layer()
    out = moe(tokens())[0]
    sizes = []
    for m in (moe, layer(cache_fp8_weights=False)):
        file = io.BytesIO()
        torch.save(m, file)
        sizes.append(file.tell())
    assert sizes[0] < sizes[1] + 1024
    for other in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert other._fp8_weights is not moe._fp8_weights and not other._fp8_weights.is_kept
        assert torch.equal(other(tokens())[0], out)
    assert list(moe.state_dict()) == ["router.weight", "c_fc.weight", "c_proj.weight"]


def test_to_frees_them():
    moe = layer()
    moe(tokens())
    assert moe._fp8_weights.is_kept
    nn.Sequential(moe).to("cpu")
    assert not moe._fp8_weights.is_kept


def arguments(strided: bool) -> dict[str, Any]:
    """Of `experts`; weights may be views of parameters."""
    moe, x = layer(), tokens()
    scores, ids = moe.router(x).detach().float().topk(2)
    weights = [moe.c_fc.weight.detach(), moe.c_proj.weight.detach()]
    given: dict[str, Any] = {"x": x, "ids": ids, "scores": scores}
    if strided:
        given["owners"] = [nn.Parameter(w.mT.contiguous()) for w in weights]
        given["w1"], given["w2"] = (owner.mT for owner in given["owners"])
    else:
        given["owners"] = [nn.Parameter(w) for w in weights]
        given["w1"], given["w2"] = given["owners"]
    return given


def run_experts(given: dict[str, Any], **options: Any) -> torch.Tensor:
    names = ("x", "ids", "scores", "w1", "w2")
    return experts(*(given[name] for name in names), precision="fp8", **options)


def run_grouped(given: dict[str, Any], **options: Any) -> torch.Tensor:
    counts = torch.full((4,), 3)
    weights = (given["w1"], given["w2"])
    return grouped_experts(given["x"], counts, *weights, precision="fp8", **options)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("function", [run_experts, run_grouped])
def test_functions(function, strided, quantized):
    given, kept = arguments(strided), Fp8Weights()
    optimizer = torch.optim.SGD(given["owners"], 0.1)
    for _ in range(2):
        want = function(given)
        quantized.clear()
        for _ in range(2):
            out = function(given, fp8_weights=kept)
            assert torch.equal(out, want)
        assert len(quantized) in (0, 2)
        out.sum().backward()
        quantized.clear()
        optimizer.step()
        assert len(quantized) == 2
        if strided:  # views of the new values
            given["w1"], given["w2"] = (owner.mT for owner in given["owners"])
        function(given, fp8_weights=kept)
        assert len(quantized) == 2
    with torch.no_grad():
        given["owners"][1].data.mul_(2)
    with pytest.raises(ValueError, match=r"^w2: expected the values it had"):
        function(given, fp8_weights=kept)
    kept.refresh()
    assert torch.equal(function(given, fp8_weights=kept), function(given))


def test_bad_stores():
    given = arguments(False)
    with pytest.raises(ValueError, match=r"^fp8_weights: expected an Fp8Weights, got bool"):
        run_experts(given, fp8_weights=True)
    with pytest.raises(ValueError, match=r"^fp8_weights: expected None without precision"):
        experts(*list(given.values())[:3], given["w1"], given["w2"], fp8_weights=Fp8Weights())


def test_refresh_of_weights_whose_memory_is_gone():
    given, kept = arguments(False), Fp8Weights()
    kept.refresh()
    run_experts(given, fp8_weights=kept)
    kept.refresh()
    assert kept.is_kept
    given["owners"][1].data = torch.empty(0)
    kept.refresh()
    assert not kept.is_kept


def test_cleared_weights_are_freed():
    given, kept = arguments(False), Fp8Weights()
    run_experts(given, fp8_weights=kept)
    weights = [weakref.ref(owner) for owner in given["owners"]]
    given.clear()
    kept.clear()
    gc.collect()
    assert all(w() is None for w in weights)
